"""Addresses, keys, logs, metrics and traces of a process."""

from __future__ import annotations

import asyncio
import json
import logging
import socket
from pathlib import Path

import pytest

from tokenloom.api.v1 import common_pb2
from tokenloom.common.address import Address, check_port_free, parse_address, remove_stale_socket
from tokenloom.common.auth import ApiKeys, bearer_of, digest_of, load_api_keys
from tokenloom.common.errors import SetupError, Unauthenticated, Unavailable
from tokenloom.common.logs import ConsoleFormatter, JsonFormatter
from tokenloom.common.metrics import MetricsServer, fetch_metrics
from tokenloom.common.telemetry import extract, inject


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("unix:/run/x.sock", Address(path="/run/x.sock")),
        ("unix:///run/x.sock", Address(path="/run/x.sock")),
        ("127.0.0.1:80", Address(host="127.0.0.1", port=80)),
        ("[::1]:80", Address(host="::1", port=80)),
        (":80", Address(host="0.0.0.0", port=80)),
    ],
)
def test_addresses_are_sockets_or_host_and_port(text: str, address: Address) -> None:
    assert parse_address(text) == address
    assert parse_address(str(address)) == address


@pytest.mark.parametrize("text", ["", "host", "host:", "host:http", "host:70000", "unix:", "unix:/" + "x" * 200])
def test_what_is_no_address_is_a_setup_error(text: str) -> None:
    with pytest.raises(SetupError):
        parse_address(text)


def test_a_dead_process_s_socket_is_removed_and_a_living_one_s_is_not(tmp_path: Path) -> None:
    address = Address(path=str(tmp_path / "s"))
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(address.path)
        listener.listen()
        with pytest.raises(SetupError, match="in use"):
            remove_stale_socket(address)
    remove_stale_socket(address)
    assert not Path(address.path).exists()
    (tmp_path / "file").write_text("precious")
    with pytest.raises(SetupError, match="no socket"):
        remove_stale_socket(Address(path=str(tmp_path / "file")))


def test_a_port_in_use_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        with pytest.raises(SetupError, match=str(port)):
            check_port_free(Address(host="127.0.0.1", port=port))
    check_port_free(Address(host="127.0.0.1", port=port))


def test_keys_open_only_to_those_who_know_one() -> None:
    keys = load_api_keys(["one", "two"])
    keys.check(digest_of("one"))
    keys.check(digest_of("two"))
    for digest in (b"", digest_of("three"), digest_of("one")[:-1], b"one"):
        with pytest.raises(Unauthenticated):
            keys.check(digest)
    assert ApiKeys().check(b"") is None


@pytest.mark.parametrize(
    ("header", "key"), [("Bearer k", "k"), ("bearer  k ", "k"), ("Basic k", ""), ("", ""), (None, ""), ("Bearer", "")]
)
def test_only_a_bearer_header_carries_a_key(header: str | None, key: str) -> None:
    assert bearer_of(header) == key


def test_logs_are_one_line_with_the_request_id() -> None:
    record = logging.makeLogRecord({"levelno": 20, "levelname": "INFO", "name": "x", "msg": "hi %s", "args": ("you",)})
    record.request_id = "r1"
    entry = json.loads(JsonFormatter("gateway").format(record))
    assert (entry["message"], entry["request_id"], entry["stage"], entry["level"]) == (
        "hi you",
        "r1",
        "gateway",
        "info",
    )
    line = ConsoleFormatter("gateway").format(record)
    assert "\n" not in line
    assert line.endswith("hi you request_id=r1")


def test_a_metrics_page_is_served_and_fetched(tmp_path: Path) -> None:
    async def test() -> None:
        address = f"unix:{tmp_path}/metrics"
        server = MetricsServer(address, lambda: b"a 1\n" * 50_000)
        await server.start()
        assert await fetch_metrics(address) == b"a 1\n" * 50_000
        await server.stop()
        with pytest.raises(Unavailable):
            await fetch_metrics(f"unix:{tmp_path}/nobody")

    asyncio.run(test())


def test_a_trace_context_survives_the_frame() -> None:
    sent = common_pb2.TraceContext(traceparent="00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01")
    assert inject(extract(sent)) == sent
    assert inject(extract(common_pb2.TraceContext())) == common_pb2.TraceContext()
