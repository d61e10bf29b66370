"""A scheduler whose executor another one took over leaves it alone, and blames no request for that."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path
from typing import Any

import pytest

from tests.fakes import FakeExecutor, continuation
from tests.service.scheduler_stack import Tokenizer, run, scheduler_on, submit
from tokenloom.api.v1 import executor_pb2
from tokenloom.common.errors import FailedPrecondition
from tokenloom.common.metrics import REGISTRY

NUM_TOKENS = 40
PROMPT = [11, 5, 6, 7, 8]


class SharedExecutor(FakeExecutor):
    """Can be taken over by another scheduler."""

    def __init__(self) -> None:
        super().__init__(step_s=0.02)
        self.last_epochs: list[executor_pb2.Epoch | None] = []
        self.is_taken = False

    def take_over(self) -> None:
        """Another scheduler begins an epoch."""
        self.void_stream()
        self.counter += 1
        self.is_taken = True

    async def Initialize(
        self, request: executor_pb2.InitializeRequest, context: Any
    ) -> executor_pb2.InitializeResponse:
        self.last_epochs.append(request.last_epoch if request.HasField("last_epoch") else None)
        if self.is_taken:
            raise FailedPrecondition("another scheduler has this executor", reason="EXECUTOR_IN_USE")
        return await super().Initialize(request, context)


def test_a_replaced_scheduler_says_which_epoch_it_had_and_goes_on_when_the_other_one_is_gone(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def test() -> None:
        executor = SharedExecutor()
        async with scheduler_on(tmp_path, executor) as stage:
            tokenizer = Tokenizer(tmp_path)
            await tokenizer.open()
            await tokenizer.send(submits=[submit(1, PROMPT, NUM_TOKENS)])
            while len(tokenizer.tokens.get(1, [])) < 5:
                await tokenizer.read()
            num_losses = REGISTRY.get_sample_value("tokenloom_executor_losses_total")
            had = executor.epoch()
            executor.take_over()
            while len(executor.last_epochs) < 4:
                await asyncio.sleep(0.01)
            assert not stage.engine.is_ready
            assert executor.last_epochs == [None, had, had, had]
            executor.is_taken = False
            await tokenizer.read_until_ended(1)
            assert tokenizer.tokens[1] == continuation(PROMPT, NUM_TOKENS)
            assert stage.engine.core is not None
            assert len(stage.engine.core.suspects) == 0
            assert REGISTRY.get_sample_value("tokenloom_executor_losses_total") == num_losses
            await tokenizer.close()
            executor.restart_counting()

    with caplog.at_level(logging.WARNING):
        run(test())
    assert not [record for record in caplog.records if "may have killed" in record.getMessage()]
