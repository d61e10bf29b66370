"""A stream goes on where it was when the scheduler or the executor behind it is killed."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from typing import Any

import pytest

from tests.system.stack import Stack, running_stack
from tests.tiny_models import write_tiny_model

NUM_OUTPUT = 600


@pytest.fixture(scope="module")
def tiny_stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    model = write_tiny_model(tmp_path_factory.mktemp("models") / "tiny-llama", "llama")
    with running_stack(f"--model={model}", "--dtype=float32") as stack:
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


@pytest.mark.parametrize("stage", ["executor", "scheduler"])
def test_a_stream_survives_a_killed_stage_without_a_lost_or_repeated_token(tiny_stack: Stack, stage: str) -> None:
    undisturbed = texts(list(pieces(tiny_stack)))
    stream = pieces(tiny_stack)
    found = [next(stream) for _ in range(20)]
    killed = tiny_stack.stage_pids()[stage]
    os.kill(killed, signal.SIGKILL)
    found += stream
    assert tiny_stack.stage_pids()[stage] != killed
    assert texts(found) == undisturbed
