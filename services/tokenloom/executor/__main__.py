"""Runs the executor stage: `python -m tokenloom.executor`."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from tokenloom.common.config import parse
from tokenloom.common.stage import run_main, run_stage
from tokenloom.executor.config import ExecutorConfig, prepare_environment

DESCRIPTION = "Holds the model and its KV memory and runs the scheduler's batches."


def main(argv: Sequence[str]) -> int:
    """Run until told to stop; returns the exit code. Raises: SetupError."""
    config = parse(ExecutorConfig, "tokenloom executor", DESCRIPTION, argv)
    prepare_environment()
    from tokenloom.executor.stage import ExecutorStage  # imports torch, which reads the environment

    return run_stage("executor", config.process, lambda: ExecutorStage(config))


if __name__ == "__main__":
    sys.exit(run_main(lambda: main(sys.argv[1:]), extra="executor"))
