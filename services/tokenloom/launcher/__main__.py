"""`tokenloom serve`, `python -m tokenloom.launcher`."""

from __future__ import annotations

import sys

from tokenloom.common.stage import run_main
from tokenloom.launcher.serve import main

if __name__ == "__main__":
    sys.exit(run_main(lambda: main(sys.argv[1:]), extra="all"))
