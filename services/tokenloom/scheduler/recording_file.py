"""Where the flight recorder writes: one file that gets everything, and a folder of files that the ring is saved to.

All writing happens in threads of its own. Nothing here raises once it has started: what cannot be written is lost, said
once in the log, and harms no step.
"""

from __future__ import annotations

import itertools
import logging
import os
import queue
import threading
from collections.abc import Callable, Iterable
from datetime import UTC, datetime
from pathlib import Path
from typing import BinaryIO

from tokenloom.common.errors import SetupError
from tokenloom.common.recording import MAGIC

log = logging.getLogger(__name__)
Chunk = bytes | Callable[[], bytes]
"""Bytes of a file, or what makes them; that runs in the writer's thread."""
_MAX_QUEUED_BYTES = 32 << 20
_CLOSE_LIMIT_S = 5.0
_SUFFIX = ".tlrec"


class RecordingFile:
    """A file that is written in a thread, from a queue of bounded size.

    Args:
        path: made anew with mode 0600; an earlier file of that name is kept as PATH.1.
        max_queued_bytes: most bytes that wait to be written.

    Raises: SetupError if the file cannot be made.
    """

    def __init__(self, path: str, max_queued_bytes: int = _MAX_QUEUED_BYTES) -> None:
        self._path = path
        self._max_queued_bytes = max_queued_bytes
        try:
            if os.path.isfile(path):
                os.replace(path, f"{path}.1")
            self._file = _created(path)
        except OSError as error:
            raise SetupError(f"--record-file: cannot write {path}: {error.strerror}") from None
        self._chunks: queue.SimpleQueue[tuple[Chunk, int] | None] = queue.SimpleQueue()
        self._num_put_bytes = 0  # changed by the caller alone
        self._num_taken_bytes = 0  # changed by the thread alone
        self.is_broken = False
        self._thread = threading.Thread(target=self._work, name="recording-file", daemon=True)
        self._thread.start()

    @property
    def has_room(self) -> bool:
        """At least half of the queue is free."""
        return self._num_put_bytes - self._num_taken_bytes <= self._max_queued_bytes // 2

    def write(self, chunk: Chunk, num_bytes: int) -> bool:
        """Queue a chunk of about `num_bytes` bytes; False, and it is dropped, if it does not fit."""
        if self._num_put_bytes - self._num_taken_bytes + num_bytes > self._max_queued_bytes:
            return False
        self._num_put_bytes += num_bytes
        self._chunks.put((chunk, num_bytes))
        return True

    def close(self) -> None:
        """Write what is queued and end; waits for at most 5 seconds."""
        self.abandon()
        self._thread.join(_CLOSE_LIMIT_S)

    def abandon(self) -> None:
        """Write what is queued and end, without waiting for it. Nothing is to be written afterwards."""
        self._chunks.put(None)

    def _work(self) -> None:
        self._attempt(lambda: self._file.write(MAGIC))
        while (item := self._chunks.get()) is not None:
            chunk, num_bytes = item
            if not self.is_broken:
                self._attempt(lambda chunk=chunk: self._write(chunk))  # type: ignore[misc]
            self._num_taken_bytes += num_bytes
        self._attempt(self._file.close)

    def _write(self, chunk: Chunk) -> None:
        self._file.write(chunk if isinstance(chunk, bytes) else chunk())
        if self._chunks.empty():
            self._file.flush()  # a crash loses nothing that was recorded before it

    def _attempt(self, write: Callable[[], object]) -> None:
        try:
            write()
        except Exception as error:  # whatever it is, requests go on
            if not self.is_broken:
                log.error("recording to %s stops: %s", self._path, error)
            self.is_broken = True


class RecordingFolder:
    """Files that the ring is saved to; the newest ones stay.

    Args:
        path: made if it is missing.
        max_files: most files that stay.

    Raises: SetupError if the folder cannot be written.
    """

    def __init__(self, path: str, max_files: int) -> None:
        self._path = Path(path)
        self._max_files = max_files
        self._numbers = itertools.count(1)
        self._thread: threading.Thread | None = None
        try:
            self._path.mkdir(parents=True, exist_ok=True, mode=0o700)
            if not os.access(self._path, os.W_OK):
                raise SetupError(f"--record-dir: cannot write into {path}")
        except OSError as error:
            raise SetupError(f"--record-dir: cannot make {path}: {error.strerror}") from None

    def save(self, chunks: Iterable[bytes], reason: str) -> None:
        """Write a recording in a thread; left out while an earlier one is still being written.

        Args:
            chunks: of the file, behind its magic number; read in the thread.
            reason: one word for the file's name.
        """
        if self._thread is not None and self._thread.is_alive():
            log.warning("a recording is still being written; the one of now (%s) is left out", reason)
            return
        name = f"{datetime.now(UTC):%Y%m%dT%H%M%S}-{next(self._numbers):04d}-{reason}{_SUFFIX}"
        self._thread = threading.Thread(target=self._write, args=(chunks, name), name="recording-save", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Wait, for at most 5 seconds, until the last file is written."""
        if self._thread is not None:
            self._thread.join(_CLOSE_LIMIT_S)

    def _write(self, chunks: Iterable[bytes], name: str) -> None:
        target, partial = self._path / name, self._path / f"{name}.partial"
        try:
            with _created(str(partial)) as file:
                file.write(MAGIC)
                file.writelines(chunks)
            partial.rename(target)
            for old in sorted(self._path.glob(f"*{_SUFFIX}"))[: -self._max_files]:
                old.unlink(missing_ok=True)
        except Exception as error:  # whatever it is, requests go on
            log.error("the recording %s cannot be written: %s", target, error)
            _remove(partial)
            return
        log.warning("the last steps were recorded in %s", target)


def _created(path: str) -> BinaryIO:
    """A new file for its owner alone: it holds prompts and outputs."""
    return os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb")


def _remove(path: Path) -> None:
    try:
        path.unlink(missing_ok=True)
    except OSError as error:
        log.error("%s cannot be removed: %s", path, error)
