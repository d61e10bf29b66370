"""What `tokenloom replay` does, from its settings to its summary."""

from __future__ import annotations

from tokenloom.common.errors import SetupError, TokenloomError
from tokenloom.common.executor_client import ExecutorClient
from tokenloom.common.recording import RecordingReader
from tokenloom.replay.config import ReplaySettings
from tokenloom.replay.replayer import Replayer, ReplayOptions, Summary


async def replay(settings: ReplaySettings) -> Summary:
    """Replay the file on the executor.

    Raises: SetupError if the file cannot be read or does not fit, or the executor does not answer.
    """
    options = ReplayOptions(settings.logprob_tolerance, settings.max_mismatches)
    client = ExecutorClient(settings.executor, settings.cluster_token, settings.timeout_s)
    try:
        with open(settings.file, "rb") as file:  # noqa: ASYNC230 - nothing else runs on this loop
            return await Replayer(client, options).run(RecordingReader(file, settings.file))
    except OSError as error:
        raise SetupError(f"{settings.file}: {error.strerror}") from None
    except TokenloomError as error:
        raise SetupError(f"executor {settings.executor}: {error}") from None
    finally:
        await client.close()
