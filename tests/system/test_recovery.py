"""A stream goes on where it was when the scheduler or the executor behind it is killed, or hangs and is restarted."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from typing import Any

import pytest

from tests.system.stack import Stack, running_stack
from tests.tiny_models import write_tiny_model

NUM_OUTPUT = 600
HANG_LIMIT_S = 4


@pytest.fixture(scope="module")
def tiny_stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    model = write_tiny_model(tmp_path_factory.mktemp("models") / "tiny-llama", "llama")
    flags = (f"--model={model}", "--dtype=float32", f"--hang-limit-s={HANG_LIMIT_S}")
    with running_stack(*flags) as stack:
        yield stack


def pieces(stack: Stack) -> Iterator[str]:
    """Text of two choices with seeds, streamed, in order of arrival."""
    options: dict[str, Any] = {"temperature": 0.5, "seed": 7, "n": 2, "extra_body": {"ignore_eos": True}}
    stream = stack.client().completions.create(
        model="tiny-llama", prompt="The fox", max_tokens=NUM_OUTPUT, stream=True, **options
    )
    for chunk in stream:
        yield f"{chunk.choices[0].index}{chunk.choices[0].text}"


def texts(found: list[str]) -> list[str]:
    return ["".join(piece[1:] for piece in found if piece[0] == index) for index in "01"]


@pytest.mark.parametrize(
    ("stage", "number"),
    [("executor", signal.SIGKILL), ("scheduler", signal.SIGKILL), ("scheduler", signal.SIGSTOP)],
)
def test_a_stream_survives_a_stage_that_dies_or_hangs_without_a_lost_or_repeated_token(
    tiny_stack: Stack, stage: str, number: signal.Signals
) -> None:
    undisturbed = texts(list(pieces(tiny_stack)))
    stream = pieces(tiny_stack)
    found = [next(stream) for _ in range(20)]
    killed = tiny_stack.stage_pids()[stage]
    os.kill(killed, number)
    found += stream
    assert tiny_stack.stage_pids()[stage] != killed
    assert texts(found) == undisturbed
    if number == signal.SIGSTOP:
        assert f"scheduler gave no sign of life for {HANG_LIMIT_S} s and was killed" in tiny_stack.output


def test_a_gateway_that_hangs_is_started_again(tiny_stack: Stack) -> None:
    killed = tiny_stack.stage_pids()["gateway"]
    os.kill(killed, signal.SIGSTOP)
    deadline_s = time.monotonic() + HANG_LIMIT_S + 20
    while not tiny_stack.is_ready():
        assert time.monotonic() < deadline_s
        time.sleep(0.05)
    assert tiny_stack.stage_pids()["gateway"] != killed
