"""The tokenizer stage as a program: `tokenloom tokenizer`, or `python -m tokenloom.tokenizer`."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from tokenloom.common.config import parse
from tokenloom.common.stage import run_main, run_stage
from tokenloom.tokenizer.config import TokenizerConfig
from tokenloom.tokenizer.stage import TokenizerStage

_DESCRIPTION = "Text to tokens and back: the public gRPC interface in front of a scheduler."


def main(argv: Sequence[str]) -> int:
    """Run the stage until it is told to stop; returns the exit code.

    Raises: SetupError if it cannot start.
    """
    config = parse(TokenizerConfig, "tokenloom tokenizer", _DESCRIPTION, argv)
    return run_stage(TokenizerStage.name, config.process, lambda: TokenizerStage(config))


if __name__ == "__main__":
    sys.exit(run_main(lambda: main(sys.argv[1:]), extra="tokenizer"))
