"""A scheduler as naive as can be: one request at a time, one token per step, nothing cached, nothing chunked.

What it answers is what the engine core must answer, whatever else runs beside a request.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from tokenloom.scheduler.core.request import FinishReason


@dataclass(frozen=True)
class Task:
    """What a caller asks for, as values that nobody changes.

    Args:
        prompt: at least one token.
        max_output_tokens: most tokens to generate, resumed ones included.
        stop_token_ids: end the answer, from `min_output_tokens` on.
        min_output_tokens: see there.
        resumed: output that was generated before.
    """

    prompt: tuple[int, ...]
    max_output_tokens: int
    stop_token_ids: frozenset[int] = frozenset()
    min_output_tokens: int = 0
    resumed: tuple[int, ...] = ()


@dataclass(frozen=True)
class Answer:
    """What a task generates and why it ends there."""

    token_ids: tuple[int, ...]
    reason: FinishReason


class ReferenceScheduler:
    """Runs tasks in the order in which they come, each to its end before the next begins.

    Args:
        next_token: the model, a pure function of all tokens.
    """

    def __init__(self, next_token: Callable[[Sequence[int]], int]) -> None:
        self._next_token = next_token
        self.answer = functools.lru_cache(maxsize=4096)(self._answer)

    def run(self, tasks: Iterable[Task]) -> list[Answer]:
        """Answers of all tasks, in their order."""
        return [self.answer(task) for task in tasks]

    def _answer(self, task: Task) -> Answer:
        tokens = list(task.prompt + task.resumed)
        while True:
            tokens.append(self._next_token(tokens))
            num_output = len(tokens) - len(task.prompt)
            output = tuple(tokens[len(task.prompt) :])
            if tokens[-1] in task.stop_token_ids and num_output >= task.min_output_tokens:
                return Answer(output, FinishReason.STOP_TOKEN)
            if num_output >= task.max_output_tokens:
                return Answer(output, FinishReason.LENGTH)
