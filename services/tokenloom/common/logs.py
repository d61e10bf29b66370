"""Structured logs: one line per message, for people (console) or machines (JSON), with the request id.

Modules use plain `logging` and pass `extra={"request_id": ...}`; keys of `extra` become fields. Prompts, outputs and
keys are never logged.
"""

from __future__ import annotations

import json
import logging
import sys
import time

_STANDARD = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}


class _Formatter(logging.Formatter):
    def __init__(self, stage: str) -> None:
        super().__init__()
        self._stage = stage

    @staticmethod
    def _time(record: logging.LogRecord) -> str:
        return time.strftime("%H:%M:%S", time.localtime(record.created)) + f".{int(record.msecs):03d}"

    @staticmethod
    def _fields(record: logging.LogRecord) -> dict[str, object]:
        return {key: value for key, value in vars(record).items() if key not in _STANDARD}


class ConsoleFormatter(_Formatter):
    """`12:00:01.250 scheduler  warning message key=value`."""

    def format(self, record: logging.LogRecord) -> str:
        """Write one record; a traceback follows on further lines."""
        fields = "".join(f" {key}={value}" for key, value in self._fields(record).items())
        line = f"{self._time(record)} {self._stage:<9} {record.levelname.lower():<7} {record.getMessage()}{fields}"
        return f"{line}\n{self.formatException(record.exc_info)}" if record.exc_info else line


class JsonFormatter(_Formatter):
    """One JSON object per line: time (seconds since the epoch), stage, level, logger, message and the extra fields."""

    def format(self, record: logging.LogRecord) -> str:
        """Write one record."""
        entry: dict[str, object] = {
            "time": round(record.created, 3),
            "stage": self._stage,
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **self._fields(record),
        }
        if record.exc_info:
            entry["traceback"] = self.formatException(record.exc_info)
        return json.dumps(entry, default=str)


def setup_logs(stage: str, level: str, style: str) -> None:
    """Send this process's logs to standard error, as `style` ("console" or "json") says."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter(stage) if style == "json" else ConsoleFormatter(stage))
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    for noisy in ("httpx", "asyncio", "transformers", "huggingface_hub", "grpc._cython.cygrpc"):
        logging.getLogger(noisy).setLevel(logging.WARNING)
