from __future__ import annotations

from typing import Any, cast

import pytest
import uvloop

from tokenloom.api.v1 import engine_pb2
from tokenloom.common.errors import Unavailable
from tokenloom.tokenizer import engine_outbox
from tokenloom.tokenizer.domain import SamplingParams, StopConditions, Submission, Trace
from tokenloom.tokenizer.engine_client import EngineClient
from tokenloom.tokenizer.engine_outbox import EngineListener, EngineOutbox, InFlight

Message = engine_pb2.EngineServiceSessionRequest


class Listener:
    """As much of a choice as a submission needs."""

    token_ids: tuple[int, ...] = ()
    needs_prompt_logprobs = False

    def __init__(self, name: str, num_prompt_tokens: int) -> None:
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
            is_resumed=False,
            is_resumable=False,
        )


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
    (message,) = outbox.messages()
    assert [submit.request_id for submit in message.submits] == ["a", "b"]
    assert [(finish.handle, finish.num_tokens_kept) for finish in message.finishes] == [(7, 4)]
    assert [(cancel.handle, cancel.reason) for cancel in message.cancels] == [(8, "gone")]
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
