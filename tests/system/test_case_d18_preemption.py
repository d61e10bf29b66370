"""Case D18: streams that cannot all run at once get, token for token, what each gets alone."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest

from tests.system.in_process import Stages, StagesOfModule, stages_of_module, total
from tests.system.step_log import watch_steps
from tokenloom.api.v1 import engine_pb2

NUM_OUTPUT = 200
NUM_BLOCKS = 40  # the ten choices below want 14 blocks each

PENALTIES = {"presence_penalty": 0.3, "frequency_penalty": 0.5, "repetition_penalty": 1.1}
SEEDED = {"temperature": 1.0, "top_k": 40, "top_p": 0.95}
BODIES: list[dict[str, Any]] = [
    {},
    {"logprobs": 2},
    {**PENALTIES, "logprobs": 0},
    {**SEEDED, "seed": 11},
    {**SEEDED, "seed": 12, "n": 2},
    {**SEEDED, **PENALTIES, "seed": 13, "n": 2, "logprobs": 1},
    {"stop": ["\x00 never said"], "logprobs": 1},
    {**SEEDED, "seed": 14, "stop": ["<a piece of its text>"], "logprobs": 1},
]


@pytest.fixture(scope="module")
def stages(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StagesOfModule]:
    with stages_of_module(tmp_path_factory.mktemp("stack"), num_blocks=NUM_BLOCKS) as running:
        yield running


@dataclass
class Choice:
    """What a stream brought of one choice."""

    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    logprobs: list[float] = field(default_factory=list)
    num_top: list[int] = field(default_factory=list)
    finish_reason: str | None = None


async def stream(stages: Stages, body: dict[str, Any]) -> list[Choice]:
    """A streamed request, put together by choice."""
    choices = [Choice() for _ in range(body.get("n", 1))]
    async for event in stages.stream(**body):
        for part in event["choices"]:
            choice = choices[part["index"]]
            assert choice.finish_reason is None, "nothing follows the end"
            choice.text += part["text"]
            choice.token_ids += part.get("token_ids", [])
            if part["logprobs"]:
                choice.logprobs += part["logprobs"]["token_logprobs"]
                choice.num_top += [len(top) for top in part["logprobs"]["top_logprobs"] or []]
            choice.finish_reason = part["finish_reason"]
    return choices


async def bodies(stages: Stages) -> list[dict[str, Any]]:
    """The requests; the last one's stop string is a piece of its own text that comes late."""
    made = [{"prompt": [20 + i, 40, 41 + i] * 6, "max_tokens": NUM_OUTPUT, **body} for i, body in enumerate(BODIES)]
    ((free),) = await stream(stages, {**made[-1], "stop": None})
    pieces = ((i, free.text[i : i + 4]) for i in range(len(free.text) // 2, len(free.text)))
    made[-1]["stop"] = [next(piece for i, piece in pieces if piece.isascii() and free.text.find(piece) == i)]
    return made


def test_streams_in_a_pool_too_small_for_them_say_what_each_says_alone(stages: StagesOfModule) -> None:
    async def test(stages: Stages) -> None:
        asked = await bodies(stages)
        before = await stages.metrics()
        alone = [await stream(stages, body) for body in asked]
        between = await stages.metrics()
        assert total(between, "tokenloom_num_preemptions_total") == total(before, "tokenloom_num_preemptions_total")
        async with watch_steps(stages) as log:
            together = await asyncio.gather(*(stream(stages, body) for body in asked))
            await log.catch_up(stages)
        after = await stages.metrics()
        num_preempted = sum(len(step.preempted_request_ids) for step in log.steps)
        assert num_preempted > 0
        reasons = [reason for step in log.steps for reason in step.preempt_reasons]
        assert reasons == [engine_pb2.PREEMPT_REASON_BLOCKS] * num_preempted
        counted = total(after, "tokenloom_num_preemptions_total") - total(between, "tokenloom_num_preemptions_total")
        assert counted == num_preempted
        for body, expected, got in zip(asked, alone, together, strict=True):
            for reference, choice in zip(expected, got, strict=True):
                assert choice.token_ids == reference.token_ids, body
                assert (choice.text, choice.finish_reason) == (reference.text, reference.finish_reason)
                assert choice.logprobs == pytest.approx(reference.logprobs, abs=1e-3)
                assert choice.num_top == reference.num_top
                check_lengths(body, choice)

    stages.run(test, limit_s=120)


def check_lengths(body: dict[str, Any], choice: Choice) -> None:
    """Exactly max_tokens unless stopped, and as many logprobs as tokens, if asked for."""
    if body.get("seed") == BODIES[-1]["seed"]:
        assert choice.finish_reason == "stop"
        assert body["stop"][0] not in choice.text
        assert NUM_OUTPUT // 4 < len(choice.token_ids) < NUM_OUTPUT
    else:
        assert choice.finish_reason == "length"
        assert len(choice.token_ids) == NUM_OUTPUT
    num_logprobs = body.get("logprobs")
    assert len(choice.logprobs) == (0 if num_logprobs is None else len(choice.token_ids))
