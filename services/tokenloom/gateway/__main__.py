"""`tokenloom gateway`: HTTP in OpenAI's format in front of tokenizer stages."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from tokenloom.common.config import parse
from tokenloom.common.stage import run_main, run_stage
from tokenloom.gateway.config import GatewayConfig
from tokenloom.gateway.server import GatewayStage

DESCRIPTION = "HTTP in OpenAI's format: chat and text completions, models, health and metrics."


def main(argv: Sequence[str]) -> int:
    """Run the gateway until it is told to stop. Returns: the exit code. Raises: SetupError."""
    config = parse(GatewayConfig, "tokenloom gateway", DESCRIPTION, argv)
    return run_stage("gateway", config.process, lambda: GatewayStage(config))


if __name__ == "__main__":
    sys.exit(run_main(lambda: main(sys.argv[1:]), extra="gateway"))
