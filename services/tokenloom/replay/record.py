"""`tokenloom record`, `python -m tokenloom.replay.record`."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
from collections.abc import Sequence

from tokenloom.common.config import parse
from tokenloom.common.errors import SetupError, TokenloomError
from tokenloom.common.recording import MAGIC, framed
from tokenloom.common.stage import run_main
from tokenloom.replay.config import RecordSettings
from tokenloom.replay.scheduler_client import recorded_entries

DESCRIPTION = "Writes the steps that a scheduler's flight recorder holds into a file, for `tokenloom replay`."


def main(argv: Sequence[str]) -> int:
    """Fetch and write; returns the exit code."""
    settings = parse(RecordSettings, "tokenloom record", DESCRIPTION, argv)
    num_steps = asyncio.run(record(settings))
    sys.stdout.write(f"{settings.file}: {num_steps} steps\n")
    return 0


async def record(settings: RecordSettings) -> int:
    """Write the recording; the file is there only if it is whole. Returns the number of its steps.

    Raises: SetupError if there is no recording, or it cannot be written.
    """
    num_steps, partial = 0, f"{settings.file}.partial"
    try:
        with os.fdopen(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
            file.write(MAGIC)
            async for entry in recorded_entries(settings.scheduler, settings.cluster_token, settings.timeout_s):
                file.write(framed(entry.SerializeToString()))
                num_steps += entry.HasField("plan")
        os.replace(partial, settings.file)
    except OSError as error:
        raise SetupError(f"{settings.file}: {error.strerror}") from None
    except TokenloomError as error:
        raise SetupError(f"scheduler {settings.scheduler}: {error}") from None
    finally:
        with contextlib.suppress(OSError):
            os.remove(partial)
    return num_steps


if __name__ == "__main__":
    sys.exit(run_main(lambda: main(sys.argv[1:]), extra="all"))
