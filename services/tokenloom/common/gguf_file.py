"""Reads a GGUF file: what it says of the model and its vocabulary, and where its tensors are.

The gguf package's reader turns each of a vocabulary's strings into arrays, which takes four seconds for 49,152 of them;
transformers' needs torch. This one skips the arrays that nobody asks for, and checks every length before it believes
it: files come from strangers.

Source: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_STRING, _ARRAY = 8, 9
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_MAX_COUNT = 1 << 24
_MAX_KEY_BYTES = 1 << 16
_MAX_DIMENSIONS = 4
_BLOCKS = {0: (1, 4), 1: (1, 2), 2: (32, 18), 3: (32, 20), 8: (32, 34), 30: (1, 2)}
"""Numbers and bytes of a block, by tensor type: F32, F16, Q4_0, Q4_1, Q8_0, BF16."""
NAMES = {0: "F32", 1: "F16", 2: "Q4_0", 3: "Q4_1", 8: "Q8_0", 30: "BF16"}


class GgufError(Exception):
    """The file is broken, or holds what cannot be read; the message says which."""


@dataclass(frozen=True)
class GgufTensor:
    """A tensor's place in the file.

    Args:
        type_name: F32, F16, BF16, Q4_0, Q4_1 or Q8_0; the type's number as text if it is another.
        shape: rows first, as in torch.
        row_bytes: of one row of the last dimension; 0 for a type that is not known.
        data: all rows, a view of the file.
    """

    type_name: str
    shape: tuple[int, ...]
    row_bytes: int
    data: memoryview


class GgufFile:
    """An open file; tensors are views of its mapped memory.

    Args:
        path: of the file.
        wanted_arrays: keys of arrays to read; others are skipped. None: all are wanted.

    Attributes:
        fields: scalars and strings by key, and the wanted arrays as lists.
        tensors: by name.

    Raises: GgufError.
    """

    def __init__(self, path: Path, wanted_arrays: Collection[str] | None = ()) -> None:
        with path.open("rb") as file:
            try:
                self._memory = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            except ValueError:
                raise GgufError("the file is empty") from None
        self._at = 0
        self._wanted = None if wanted_arrays is None else frozenset(wanted_arrays)
        self.fields: dict[str, Any] = {}
        self.tensors: dict[str, GgufTensor] = {}
        try:
            self._read()
        except (UnicodeDecodeError, struct.error, OverflowError) as error:
            raise GgufError(f"not a well-formed GGUF file: {error}") from None

    def _read(self) -> None:
        if self._bytes(4) != _MAGIC:
            raise GgufError("it does not begin with GGUF")
        version, num_tensors, num_fields = self._numbers("IQQ")
        if version not in _VERSIONS:
            raise GgufError(f"GGUF version {version} is not known")
        if num_tensors > _MAX_COUNT or num_fields > _MAX_COUNT:
            raise GgufError(f"{num_tensors} tensors and {num_fields} fields are more than a file can hold")
        for _ in range(num_fields):
            key, kind = self._key(), self._numbers("I")[0]
            value = self._array(self._wanted is None or key in self._wanted) if kind == _ARRAY else self._value(kind)
            if value is not None:
                self.fields[key] = value
        places = [self._tensor_place() for _ in range(num_tensors)]
        alignment = self.fields.get("general.alignment", 32)
        if not isinstance(alignment, int) or not 1 <= alignment <= 1 << 16:
            raise GgufError(f"alignment {alignment!r} is not one")
        begin = -(-self._at // alignment) * alignment
        for name, shape, kind, offset in places:
            self.tensors[name] = self._tensor(name, shape, kind, begin + offset)

    def _tensor_place(self) -> tuple[str, tuple[int, ...], int, int]:
        name, num_dimensions = self._key(), self._numbers("I")[0]
        if not 1 <= num_dimensions <= _MAX_DIMENSIONS:
            raise GgufError(f"tensor {name!r} has {num_dimensions} dimensions")
        shape = self._numbers("Q" * num_dimensions)
        kind, offset = self._numbers("IQ")
        return name, tuple(reversed(shape)), kind, offset

    def _tensor(self, name: str, shape: tuple[int, ...], kind: int, at: int) -> GgufTensor:
        if kind not in _BLOCKS:
            return GgufTensor(str(kind), shape, 0, memoryview(b""))
        numbers, num_bytes = _BLOCKS[kind]
        if shape[-1] % numbers:
            raise GgufError(f"tensor {name!r}: rows of {shape[-1]} numbers are not whole blocks of {numbers}")
        row_bytes = shape[-1] // numbers * num_bytes
        num_rows = 1
        for size in shape[:-1]:
            num_rows *= size
        if at + num_rows * row_bytes > len(self._memory):
            raise GgufError(f"tensor {name!r} ends behind the end of the file")
        data = memoryview(self._memory)[at : at + num_rows * row_bytes]
        return GgufTensor(NAMES[kind], shape, row_bytes, data)

    def _value(self, kind: int) -> Any:
        if kind == _STRING:
            return self._string()
        if kind not in _SCALARS:
            raise GgufError(f"a field has type {kind}, which is not known")
        return self._numbers(_SCALARS[kind])[0]

    def _array(self, is_wanted: bool) -> list[Any] | None:
        kind, count = self._numbers("IQ")
        if count > len(self._memory):
            raise GgufError(f"an array of {count} values is longer than the file")
        if kind in _SCALARS:
            content = self._bytes(struct.calcsize(f"<{_SCALARS[kind]}") * count)
            return list(struct.unpack(f"<{count}{_SCALARS[kind]}", content)) if is_wanted else None
        if kind == _STRING and not is_wanted:
            self._skip_strings(count)
            return None
        return [self._value(kind) for _ in range(count)]

    def _skip_strings(self, count: int) -> None:
        memory, at, size = self._memory, self._at, len(self._memory)
        read = struct.Struct("<Q").unpack_from
        for _ in range(count):
            at += 8 + read(memory, at)[0]
            if at > size:
                raise GgufError("a string ends behind the end of the file")
        self._at = at

    def _key(self) -> str:
        (length,) = self._numbers("Q")
        if length > _MAX_KEY_BYTES:
            raise GgufError(f"a name of {length} bytes is longer than names are")
        return self._bytes(length).decode()

    def _string(self) -> str:
        (length,) = self._numbers("Q")
        return self._bytes(length).decode(errors="replace")

    def _numbers(self, form: str) -> tuple[Any, ...]:
        return struct.unpack(f"<{form}", self._bytes(struct.calcsize(f"<{form}")))

    def _bytes(self, count: int) -> bytes:
        end = self._at + count
        if end > len(self._memory):
            raise GgufError("the file ends too early")
        found = self._memory[self._at : end]
        self._at = end
        return found
