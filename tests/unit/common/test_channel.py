from __future__ import annotations

import re
from pathlib import Path

import pytest
from grpc._cython import cygrpc  # type: ignore[attr-defined]

from tokenloom.common.channel import client_options, server_options


@pytest.fixture(scope="module")
def known_names() -> set[str]:
    """Every channel argument that gRPC's core spells out; it takes others in silence."""
    binary = Path(cygrpc.__file__).read_bytes()
    return {name.decode() for name in re.findall(rb"(grpc\.[a-z0-9_.]+)\x00", binary)}


def test_grpc_knows_every_channel_argument_we_set(known_names: set[str]) -> None:
    assert "grpc.keepalive_time_ms" in known_names
    assert "grpc.keepalive_time" not in known_names
    ours = {name for name, _ in [*client_options(1), *server_options(1)]}
    assert ours <= known_names, ours - known_names


def test_both_sides_have_the_same_message_limits() -> None:
    limits = [{k: v for k, v in options(77) if "message_length" in k} for options in (client_options, server_options)]
    assert limits[0] == limits[1] == {"grpc.max_send_message_length": 77, "grpc.max_receive_message_length": 77}
