"""Keys, tenants and classes, from the public interface to the engine."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import pytest

from tests.service.tokenizer_stack import (
    Gateway,
    TokenizerStack,
    chat_request,
    complete_request,
    run,
    tokenizer_on,
    until,
)
from tokenloom.api.v1 import inference_pb2
from tokenloom.common.auth import digest_of
from tokenloom.common.channel import bearer_metadata
from tokenloom.common.config import ProcessSettings
from tokenloom.common.errors import PermissionDenied, SetupError, Unauthenticated
from tokenloom.tokenizer.config import TokenizerConfig
from tokenloom.tokenizer.stage import TokenizerStage

PERMISSION_DENIED = grpc.StatusCode.PERMISSION_DENIED.value[0]


def write_keys(folder: Path, *entries: tuple[str, str, str], tenants: str = "") -> str:
    """A keys file of (key, tenant, further fields)."""
    keys = [
        f'[[key]]\nsha256 = "{hashlib.sha256(key.encode()).hexdigest()}"\ntenant = "{tenant}"\n{fields}\n'
        for key, tenant, fields in entries
    ]
    path = folder / "keys.toml"
    path.write_text("".join(keys) + tenants)
    return str(path)


@pytest.fixture
def keys_file(tmp_path: Path) -> str:
    return write_keys(
        tmp_path,
        ("fast", "team-a", ""),
        ("slow", "team-a", "highest_class = 2"),
        ("other", "team-b", "highest_class = 1"),
        ("operator", "team-b", 'scopes = ["control"]'),
        tenants="[tenant.team-a]\nweight = 2.5\nmax_running = 8\nmax_queued = 64\ntokens_per_minute = 60000\n",
    )


def calls(stack: TokenizerStack, key: str) -> dict[str, Callable[[], Any]]:
    """A call of every RPC that keys are for."""
    metadata, stub = bearer_metadata(key), stack.stub
    chat = chat_request()
    return {
        "Chat": lambda: stub.Chat(chat, metadata=metadata),
        "Complete": lambda: stub.Complete(complete_request([5]), metadata=metadata),
        "Tokenize": lambda: stub.Tokenize(inference_pb2.TokenizeRequest(text="a"), metadata=metadata),
        "Detokenize": lambda: stub.Detokenize(inference_pb2.DetokenizeRequest(token_ids=[5]), metadata=metadata),
        "RenderChat": lambda: stub.RenderChat(inference_pb2.RenderChatRequest(chat=chat), metadata=metadata),
        "ListModels": lambda: stub.ListModels(inference_pb2.ListModelsRequest(), metadata=metadata),
    }


def test_keys_of_one_tenant_share_it_and_its_cache_and_others_do_not(tmp_path: Path, keys_file: str) -> None:
    async def scenario() -> None:
        async with tokenizer_on(tmp_path, keys_file=keys_file, api_key=("plain",)) as stack:
            for key in ("fast", "slow", "other", "plain"):
                await stack.chat(key=key, cache_salt="s")
            fast, slow, other, plain = stack.engine.submits
            assert [submit.tenant for submit in (fast, slow, other)] == ["team-a", "team-a", "team-b"]
            assert plain.tenant == hashlib.sha256(b"plain").hexdigest()[:16]
            assert fast.cache_salt == slow.cache_salt == "team-a/s"
            assert len({fast.cache_salt, other.cache_salt, plain.cache_salt}) == 3
            for key in ("", "unknown", hashlib.sha256(b"fast").hexdigest()):
                with pytest.raises(Unauthenticated):
                    await stack.chat(key=key)

    run(scenario())


def test_a_single_tenants_cache_needs_no_wall(tmp_path: Path) -> None:
    async def scenario() -> None:
        path = write_keys(tmp_path, ("one", "t", ""), ("two", "t", ""))
        async with tokenizer_on(tmp_path, keys_file=path) as stack:
            await stack.chat(key="one")
            assert stack.engine.submits[0].cache_salt == ""

    run(scenario())


def test_the_engine_is_told_of_tenants_in_each_session_before_their_requests(tmp_path: Path, keys_file: str) -> None:
    async def scenario() -> None:
        async with tokenizer_on(tmp_path, keys_file=keys_file, api_key=("plain",)) as stack:
            for _ in range(2):
                await until(lambda: len(stack.engine.tenants) == 3)
                await stack.chat(key="fast")
                assert {num_submits for _, num_submits in stack.engine.tenants} == {0}
                policies = {policy.tenant: policy for policy, _ in stack.engine.tenants}
                plain = hashlib.sha256(b"plain").hexdigest()[:16]
                assert policies.keys() == {"team-a", "team-b", plain}
                told = policies["team-a"]
                assert (told.weight, told.max_num_running, told.max_num_waiting) == (2.5, 8, 64)
                assert told.max_tokens_per_minute == 60000
                for name in ("team-b", plain):
                    assert [field.name for field, _ in policies[name].ListFields()] == ["tenant", "weight"]
                    assert policies[name].weight == 1.0
                await stack.kill_engine()
                await stack.revive_engine()
                await stack.until_health(1)

    run(scenario())


def test_a_request_in_flight_is_sent_again_behind_its_tenant(tmp_path: Path, keys_file: str) -> None:
    async def scenario() -> None:
        async with tokenizer_on(tmp_path, keys_file=keys_file) as stack:
            stack.engine.may_step.clear()
            call = stack.stub.Chat(chat_request(remaining_time_ms=20_000), metadata=bearer_metadata("slow"))
            await until(lambda: stack.engine.submits)
            killed = await stack.kill_engine()
            await stack.revive_engine()
            await stack.collect(call)
            (first,), (again,) = killed.submits, stack.engine.submits
            assert (again.tenant, again.priority_class) == ("team-a", 2)
            assert {num_submits for _, num_submits in stack.engine.tenants} == {0}
            assert not first.HasField("age_ms")
            assert again.age_ms > 0
            assert again.remaining_time_ms < first.remaining_time_ms
            assert again.remaining_time_ms + again.age_ms <= 20_001

    run(scenario())


def test_no_class_is_the_keys_highest_and_a_more_urgent_one_is_refused(tmp_path: Path, keys_file: str) -> None:
    async def scenario() -> None:
        async with tokenizer_on(tmp_path, keys_file=keys_file) as stack:
            await stack.chat(key="fast")
            await stack.chat(key="slow")
            await stack.chat(key="slow", priority_class=2)
            await stack.chat(key="slow", priority_class=9)
            assert [submit.priority_class for submit in stack.engine.submits] == [0, 2, 2, 9]
            for asked in (0, 1):
                with pytest.raises(PermissionDenied, match=f"priority is {asked}.*highest class is 2") as caught:
                    await stack.chat(key="slow", priority_class=asked)
                assert (caught.value.field, caught.value.reason) == ("priority", "PRIORITY_TOO_HIGH")
            assert len(stack.engine.submits) == 4

    run(scenario())


def test_without_keys_every_class_may_be_asked_for_and_none_is_the_most_urgent(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with tokenizer_on(tmp_path) as stack:
            await stack.chat()
            await stack.chat(priority_class=0)
            await stack.chat(priority_class=3)
            assert [submit.priority_class for submit in stack.engine.submits] == [0, 0, 3]
            assert stack.engine.tenants == []

    run(scenario())


def test_a_key_for_control_alone_may_only_ask_for_the_models(tmp_path: Path, keys_file: str) -> None:
    async def scenario() -> None:
        async with tokenizer_on(tmp_path, keys_file=keys_file) as stack:
            for name, call in calls(stack, "operator").items():
                if name == "ListModels":
                    await call()
                    continue
                refusal = await stack.refusal(call())
                assert isinstance(refusal, PermissionDenied), name
                assert refusal.reason == "SCOPE_MISSING"
            assert stack.engine.submits == []
            for call in calls(stack, "fast").values():
                answered = call()
                await (stack.collect(answered) if hasattr(answered, "__aiter__") else answered)

    run(scenario())


def test_a_gateways_callers_have_the_tenant_class_and_scopes_of_their_keys(tmp_path: Path, keys_file: str) -> None:
    async def scenario() -> None:
        async with tokenizer_on(tmp_path, keys_file=keys_file, cluster_token="cluster") as stack:
            gateway = Gateway(stack, "cluster")
            await gateway.open()
            gateway.read()
            starts: list[tuple[str, dict[str, Any]]] = [
                ("other", {}),
                ("other", {"priority_class": 0}),
                ("operator", {}),
                ("fast", {"priority_class": 0}),
            ]
            for handle, (key, options) in enumerate(starts, 1):
                await gateway.start(chat_request(**options), first=handle, key_digest=digest_of(key))
            await until(lambda: len(gateway.completed) + len(gateway.failed) == 4)
            assert gateway.completed.keys() == {1, 4}
            assert {error.code for error in gateway.failed.values()} == {PERMISSION_DENIED}
            assert (gateway.failed[2].field, gateway.failed[3].field) == ("priority", "")
            sent = {(submit.tenant, submit.priority_class) for submit in stack.engine.submits}
            assert sent == {("team-b", 1), ("team-a", 0)}

    run(scenario())


@pytest.mark.parametrize(
    ("listen", "token", "is_refused"),
    [("0.0.0.0:0", "", True), ("127.0.0.1:0,:0", "", True), ("0.0.0.0:0", "t", False), ("127.0.0.1:0", "", False)],
)
def test_digests_that_others_may_read_open_no_session_from_outside(
    tmp_path: Path, keys_file: str, listen: str, token: str, is_refused: bool
) -> None:
    process = ProcessSettings(cluster_token=token)
    config = TokenizerConfig(process, model=str(tmp_path / "none"), listen=listen, keys_file=keys_file)
    with pytest.raises(SetupError) as caught:  # at the latest, there is no such model
        TokenizerStage(config)
    assert ("--cluster-token" in str(caught.value)) == is_refused


def test_a_keys_file_with_a_fault_is_a_setup_error(tmp_path: Path) -> None:
    path = write_keys(tmp_path, ("k", "t", "highest_clas = 1"))
    config = TokenizerConfig(ProcessSettings(), model=str(tmp_path / "none"), keys_file=path)
    with pytest.raises(SetupError, match=r"keys\.toml: key 1: unknown field 'highest_clas'"):
        TokenizerStage(config)
