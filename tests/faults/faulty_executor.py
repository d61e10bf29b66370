"""The real executor with faults that a test orders: `python -m tests.faults.faulty_executor --listen ...`.

Nothing in the product knows of this. The program wraps three methods of the runner before it starts the stage, and
looks into the folder `TOKENLOOM_TEST_FAULTS` before each step for orders, one file each (see `Orders`).
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

VARIABLE = "TOKENLOOM_TEST_FAULTS"
CRASH_CODE = 134


class Orders:
    """What a running executor is told to do wrong, as files in a folder; they outlive a crash.

    slow     every step takes so many seconds longer
    crawl    every layer of a step takes so many seconds longer: it moves, but slowly
    nan      logits of rows whose prompt holds this token id are NaN
    poison   the process ends at a step with a row whose prompt holds this token id
    oom      the next steps, as many as the number says, raise MemoryError
    cuda     the same with torch's error of a GPU out of memory
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def give(self, order: str, value: float) -> None:
        """Order a fault."""
        partial = self._folder / f".{order}"
        partial.write_text(repr(value))
        partial.rename(self._folder / order)

    def withdraw(self) -> None:
        """No more faults."""
        for file in self._folder.iterdir():
            file.unlink(missing_ok=True)

    def is_done(self, order: str) -> bool:
        """There is no such order, or not any more."""
        return self.value(order) is None

    def value(self, order: str) -> float | None:
        """The order's number; None if there is no such order."""
        with contextlib.suppress(FileNotFoundError):
            return float((self._folder / order).read_text())
        return None

    def take(self, order: str) -> bool:
        """Whether a step is to fail by this order; counts it down."""
        left = self.value(order)
        if left is None:
            return False
        if left > 1:
            self.give(order, left - 1)
        else:
            (self._folder / order).unlink(missing_ok=True)
        return True


def inject(orders: Orders) -> None:
    """Wrap the runner's methods."""
    from tokenloom.executor.attention import PagedStep
    from tokenloom.executor.model import PagedModel
    from tokenloom.executor.runner import Runner

    runner: Any = Runner
    model: Any = PagedModel
    step: Any = PagedStep
    run_layer = step.run
    execute, last_logits, hidden_states = runner.execute, runner._last_logits, model.hidden_states
    is_running = False

    def faulty_execute(self: Any, plan: Any) -> Any:
        nonlocal is_running
        is_running = True  # the load gate's probe is none of ours
        time.sleep(orders.value("slow") or 0.0)
        try:
            return execute(self, plan)
        finally:
            is_running = False

    def faulty_last_logits(self: Any, batch: Any, sampling: list[int], hidden: Any) -> Any:
        if holds((s.row for s in batch.rows), orders.value("poison")):
            sys.stderr.write("poison: the executor ends\n")
            os._exit(CRASH_CODE)
        logits = last_logits(self, batch, sampling, hidden)
        if (marker := orders.value("nan")) is not None:
            for number, i in enumerate(sampling):
                if holds([batch.rows[i].row], marker):
                    logits[number] = float("nan")
        return logits

    def faulty_hidden_states(self: Any, *args: Any) -> Any:
        if is_running and orders.take("oom"):
            raise MemoryError("injected")
        if is_running and orders.take("cuda"):
            raise RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB (injected)")
        return hidden_states(self, *args)

    def faulty_layer(self: Any, *args: Any) -> Any:
        time.sleep((orders.value("crawl") or 0.0) if is_running else 0.0)
        return run_layer(self, *args)

    step.run = faulty_layer
    runner.execute, runner._last_logits, model.hidden_states = faulty_execute, faulty_last_logits, faulty_hidden_states


def holds(rows: Iterable[Any], token_id: float | None) -> bool:
    """Some row's prompt holds the token."""
    return token_id is not None and any(int(token_id) in row.token_ids[: row.num_prompt_tokens] for row in rows)


def main() -> int:
    from tokenloom.common.stage import run_main
    from tokenloom.executor.__main__ import main as executor_main
    from tokenloom.executor.config import prepare_environment

    prepare_environment()
    inject(Orders(Path(os.environ[VARIABLE])))
    return run_main(lambda: executor_main(sys.argv[1:]), extra="executor")


if __name__ == "__main__":
    sys.exit(main())
