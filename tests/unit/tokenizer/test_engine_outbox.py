from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import pytest
import uvloop

from tokenloom.api.v1 import engine_pb2
from tokenloom.common.errors import Internal, TokenloomError, Unavailable
from tokenloom.common.keys_file import Tenant
from tokenloom.tokenizer import engine_outbox
from tokenloom.tokenizer.domain import EngineInfo, SamplingParams, StopConditions, Submission, Trace
from tokenloom.tokenizer.engine_client import EngineClient
from tokenloom.tokenizer.engine_outbox import EngineListener, EngineOutbox, InFlight

INFO = EngineInfo("e", "m", 512, 100, 20, frozenset({2}), SamplingParams())
Message = engine_pb2.EngineServiceSessionRequest


class Listener:
    """As much of a choice as a submission needs."""

    token_ids: tuple[int, ...] = ()
    needs_prompt_logprobs = False
    error: TokenloomError | None = None

    def __init__(self, name: str, num_prompt_tokens: int) -> None:
        self.on_resume: Callable[[], object] = lambda: None
        self.submission = Submission(
            request_id=name,
            group_id=name,
            choice_index=0,
            prompt_token_ids=[5] * num_prompt_tokens,
            sampling=SamplingParams(),
            stop=StopConditions(max_tokens=1),
            priority_class=0,
            tenant="",
            cache_salt="",
            trace=Trace(),
            submitted_at_s=0.0,
            deadline_s=None,
            is_resubmitted=False,
            is_resumable=False,
        )

    def end_if_complete(self) -> bool:
        self.on_resume()
        return False

    def on_failed(self, error: TokenloomError) -> None:
        self.error = error


def entry(name: str = "r", num_prompt_tokens: int = 3) -> InFlight:
    return InFlight(cast(EngineListener, Listener(name, num_prompt_tokens)))


@pytest.fixture
def outbox() -> EngineOutbox:
    return EngineOutbox()


def test_what_one_turn_queued_is_one_message(outbox: EngineOutbox) -> None:
    outbox.add_submit(1, entry("a"))
    outbox.add_submit(2, entry("b"))
    outbox.finishes[7] = 4
    outbox.cancels[8] = "gone"
    outbox.detaches.append(9)
    (message,) = outbox.messages()
    assert [submit.request_id for submit in message.submits] == ["a", "b"]
    assert [(finish.handle, finish.num_tokens_kept) for finish in message.finishes] == [(7, 4)]
    assert [(cancel.handle, cancel.reason) for cancel in message.cancels] == [(8, "gone")]
    assert [detach.handle for detach in message.detaches] == [9]
    assert outbox.num_submitted_ids == 0
    assert list(outbox.messages()) == []


def test_large_submissions_are_spread_over_messages_and_ends_come_last(
    outbox: EngineOutbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_outbox, "_MAX_SUBMITTED_IDS_PER_MESSAGE", 10)
    for handle in range(1, 6):
        outbox.add_submit(handle, entry(num_prompt_tokens=6))
    outbox.cancels[9] = "gone"
    messages: list[Message] = list(outbox.messages())
    assert [[submit.handle for submit in message.submits] for message in messages] == [[1, 2], [3, 4], [5]]
    assert [len(message.cancels) for message in messages] == [0, 0, 1]


def test_tenants_are_defined_in_the_first_message_and_once(
    outbox: EngineOutbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_outbox, "_MAX_SUBMITTED_IDS_PER_MESSAGE", 3)
    outbox.add_submit(1, entry())
    outbox.add_submit(2, entry())
    outbox.add_tenants([Tenant("a", 0.5, max_queued=3), Tenant("b")])
    messages: list[Message] = list(outbox.messages())
    assert [[policy.tenant for policy in message.tenants] for message in messages] == [["a", "b"], []]
    limited, free = messages[0].tenants
    assert (limited.weight, limited.max_num_waiting) == (0.5, 3)
    assert not limited.HasField("max_num_running")
    assert [field.name for field, _ in free.ListFields()] == ["tenant", "weight"]


def test_tenants_alone_are_a_message_and_are_forgotten_with_the_session(outbox: EngineOutbox) -> None:
    outbox.add_tenants([Tenant("a")])
    assert outbox.filled.is_set()
    (message,) = outbox.messages()
    assert len(message.tenants) == 1
    outbox.add_tenants([Tenant("a")])
    outbox.clear()
    assert list(outbox.messages()) == []


def test_a_submission_taken_back_is_never_written(outbox: EngineOutbox) -> None:
    outbox.add_submit(1, entry())
    assert outbox.drop_submit(1)
    assert not outbox.drop_submit(1)
    assert outbox.num_submitted_ids == 0
    assert list(outbox.messages()) == []


def test_only_what_was_written_before_is_a_resubmission(outbox: EngineOutbox) -> None:
    choice = entry()
    outbox.add_submit(1, choice)
    (first,) = outbox.messages()
    outbox.add_submit(1, choice)
    (second,) = outbox.messages()
    assert not first.submits[0].HasField("age_ms")
    assert second.submits[0].HasField("age_ms")


def test_nothing_is_taken_before_the_engine_was_ever_there() -> None:
    async def scenario() -> None:
        nowhere: dict[str, Any] = {"cluster_token": "", "model_id": "m", "tokenizer_fingerprint": ""}
        client = EngineClient("unix:/nowhere", **nowhere)
        with pytest.raises(Unavailable):
            client.submit(entry().listener)
        assert client.num_living == 0

    uvloop.run(scenario())


def client_with(*listeners: Listener) -> EngineClient:
    """A client whose session is up and whose choices were written."""
    client = EngineClient("unix:/nowhere", cluster_token="", model_id="m", tokenizer_fingerprint="")
    client._on_up(INFO)
    for listener in listeners:
        client.submit(cast(EngineListener, listener))
    list(client._outbox.messages())
    return client


def test_a_choice_that_ends_between_sessions_is_attached_before_it_is_finished() -> None:
    async def scenario() -> None:
        ends, stays = Listener("ends", 3), Listener("stays", 3)
        ends.token_ids = (7, 8)
        client = client_with(ends, stays)
        ends.on_resume = lambda: client.finish(1, 2)
        client._on_down("test")
        client._on_up(INFO)
        (message,) = client._outbox.messages()
        assert [submit.request_id for submit in message.submits] == ["stays"]
        assert [(a.handle, a.request_id, a.from_token_index) for a in message.attaches] == [(1, "ends", 2)]
        assert [(finish.handle, finish.num_tokens_kept) for finish in message.finishes] == [(1, 2)]
        await client.close()

    uvloop.run(scenario())


def test_a_choice_given_up_before_it_was_sent_again_is_attached_and_cancelled() -> None:
    async def scenario() -> None:
        client = client_with(Listener("old", 3))
        client._on_down("test")
        client._on_up(INFO)
        client.submit(cast(EngineListener, Listener("new", 3)))
        for handle in (1, 2):
            client.cancel(handle, "gone")
        (message,) = client._outbox.messages()
        assert [attach.request_id for attach in message.attaches] == ["old"]
        assert [cancel.handle for cancel in message.cancels] == [1]  # the engine never heard of the new one
        assert not message.submits
        await client.close()

    uvloop.run(scenario())


def test_a_fault_in_one_choice_does_not_keep_the_others_from_their_new_session() -> None:
    async def scenario() -> None:
        def fail() -> None:
            raise RuntimeError("broken")

        broken, sound = Listener("broken", 3), Listener("sound", 3)
        client = client_with(broken, sound)
        broken.on_resume = fail
        client._on_down("test")
        client._on_up(INFO)
        (message,) = client._outbox.messages()
        assert [submit.request_id for submit in message.submits] == ["sound"]
        assert [attach.request_id for attach in message.attaches] == ["broken"]
        assert isinstance(broken.error, Internal)
        assert client._give_up is None
        await client.close()

    uvloop.run(scenario())
