"""The file format of recordings (recording.proto): written by the scheduler, read by `tokenloom replay`.

A file is `MAGIC` and then entries, each a serialized RecordingEntry behind its length as a varint. Writers put entries
together from serialized messages, which copies nothing twice; readers parse them.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator
from typing import BinaryIO

from google.protobuf.message import DecodeError, Message

from tokenloom.api.v1 import recording_pb2
from tokenloom.common.channel import INTERNAL_MESSAGE_BYTES
from tokenloom.common.errors import SetupError

MAGIC = b"TLREC\0\0\1"
MAX_ENTRY_BYTES = 2 * INTERNAL_MESSAGE_BYTES
_LENGTH_DELIMITED = 2
_MAX_VARINT_BYTES = 10


class EntryKind(enum.IntEnum):
    """Field numbers of RecordingEntry."""

    HEADER = 1
    ROW = 2
    PLAN = 3
    RESULT = 4


def entry_of(kind: EntryKind, message: Message) -> bytes:
    """A serialized RecordingEntry that holds `message`."""
    payload = message.SerializeToString()
    return bytes((kind << 3 | _LENGTH_DELIMITED,)) + _varint(len(payload)) + payload


def framed(entry: bytes) -> bytes:
    """An entry as it stands in a file."""
    return _varint(len(entry)) + entry


class RecordingReader:
    """Reads the entries of a file, one by one.

    Attributes:
        is_truncated: the file ended inside an entry, which is left out; known once all entries were read.
    """

    def __init__(self, file: BinaryIO, name: str) -> None:
        """Check the file's beginning.

        Raises: SetupError if it is no recording.
        """
        self._file = file
        self._name = name
        self.is_truncated = False
        if (begin := file.read(len(MAGIC))) != MAGIC:
            what = "is empty" if not begin else "is no recording: its first bytes are not those of one"
            raise SetupError(f"{name} {what}")

    def __iter__(self) -> Iterator[recording_pb2.RecordingEntry]:
        """The entries in their order.

        Raises: SetupError with the position if the file is corrupt.
        """
        at, is_first = len(MAGIC), True
        while (length := self._read_length(at)) is not None:
            data = self._file.read(length)
            if len(data) < length:
                self.is_truncated = True
                return
            entry = self._parsed(data, at)
            if is_first and not entry.HasField("header"):
                raise self._corrupt(at, "the first entry is no header")
            is_first = False
            at = self._file.tell()
            yield entry
        if is_first:
            raise SetupError(f"{self._name} is a recording without a single entry")

    def _parsed(self, data: bytes, at: int) -> recording_pb2.RecordingEntry:
        try:
            entry = recording_pb2.RecordingEntry.FromString(data)
        except DecodeError:
            raise self._corrupt(at, "the entry cannot be read") from None
        if entry.WhichOneof("kind") is None:
            raise self._corrupt(at, "an entry of an unknown kind")
        return entry

    def _read_length(self, at: int) -> int | None:
        """The next entry's length; None at the end of the file."""
        length = 0
        for i in range(_MAX_VARINT_BYTES):
            byte = self._file.read(1)
            if not byte:
                self.is_truncated = i > 0
                return None
            length |= (byte[0] & 0x7F) << 7 * i
            if byte[0] < 0x80:
                if length > MAX_ENTRY_BYTES:
                    raise self._corrupt(at, f"an entry of {length} bytes")
                return length
        raise self._corrupt(at, "the entry's length cannot be read")

    def _corrupt(self, at: int, what: str) -> SetupError:
        return SetupError(f"{self._name} is corrupt at byte {at}: {what}")


def _varint(value: int) -> bytes:
    out = bytearray()
    while value >= 0x80:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)
