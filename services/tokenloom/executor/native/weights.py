"""Weights of the Llama shape as the kernels want them: by plain names, in packed matrices.

A source gives rows of bytes in a format's own form (GGUF's blocks, or numbers); `pack` lays rows of one or several
tensors out as one matrix. Where tensors that belong together come in different formats, all become Q8_0.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from tokenloom.executor.native.library import GROUP, Format, Matrix, Pool

Bytes = NDArray[np.uint8]
Floats = NDArray[np.float32]
LANES = 16
_UNPACKED = {Format.F32: 4, Format.BF16: 2}


class UnsupportedWeights(Exception):
    """The kernels cannot serve these weights; the message says why."""


@dataclass(frozen=True)
class RawMatrix:
    """A matrix as a file has it: `[num_outputs, bytes of a row]`."""

    format: Format
    num_inputs: int
    rows: Bytes

    @property
    def num_outputs(self) -> int:
        """Rows."""
        return int(self.rows.shape[0])

    def ordered(self, order: NDArray[np.int64]) -> RawMatrix:
        """The same rows in another order."""
        return RawMatrix(self.format, self.num_inputs, self.rows[order])


class WeightSource(Protocol):
    """A model's files. Names are those of `layer_name`, and embedding, head, final_norm."""

    def matrix(self, name: str) -> RawMatrix:
        """A matrix. Raises: UnsupportedWeights if there is none, or in a format that is not known."""

    def vector(self, name: str) -> Floats | None:
        """A vector; None if the model has none of that name."""


def layer_name(index: int, part: str) -> str:
    """A layer's part: q, k, v, o, gate, up, down; attention_norm, mlp_norm, q_norm, k_norm; q_bias and so on."""
    return f"layers.{index}.{part}"


class PackedMatrix:
    """A matrix in the kernels' layout, and the memory that it stands on.

    Args:
        parts: rows one after the other, all with the same inputs.
        bias: of all rows, or None.
        interleaved: two parts that take turns, 16 rows each.
        input_bits: to which inputs are rounded if the format is packed, 8 or 15.
    """

    def __init__(
        self,
        pool: Pool,
        parts: Sequence[RawMatrix],
        bias: Floats | None = None,
        *,
        interleaved: bool = False,
        input_bits: int = 15,
    ) -> None:
        parts = _of_one_format(pool, parts)
        self.format = parts[0].format
        num_inputs, num_outputs = parts[0].num_inputs, sum(part.num_outputs for part in parts)
        num_bytes = pool.library.tl_packed_bytes(self.format, num_outputs, num_inputs)
        if num_bytes < 0:
            raise UnsupportedWeights(f"rows of {num_inputs} inputs are not whole groups of {GROUP}")
        self._data = np.empty(num_bytes + 64, np.uint8)
        offset = -self._data.ctypes.data % 64
        rows = [np.ascontiguousarray(part.rows) for part in parts]
        addresses = [
            part.ctypes.data + np.arange(part.shape[0], dtype=np.uint64) * np.uint64(part.shape[1]) for part in rows
        ]
        table = _taking_turns(addresses) if interleaved else np.concatenate(addresses)
        data = self._data.ctypes.data + offset
        pool.library.tl_pack(pool.handle, self.format, table.ctypes.data, num_outputs, num_inputs, data)
        self._bias = None if bias is None else np.ascontiguousarray(bias, np.float32)
        bias_address = None if self._bias is None else self._bias.ctypes.data
        self.c = Matrix(data, self.format, num_outputs, num_inputs, input_bits, bias_address)

    @property
    def num_bytes(self) -> int:
        """Memory that it takes."""
        return self._data.nbytes


def _taking_turns(addresses: Sequence[NDArray[np.uint64]]) -> NDArray[np.uint64]:
    first, second = addresses
    if first.size != second.size or first.size % LANES:
        raise UnsupportedWeights(f"{first.size} outputs are not whole tiles of {LANES}")
    return np.stack([first.reshape(-1, LANES), second.reshape(-1, LANES)], axis=1).reshape(-1)


def _of_one_format(pool: Pool, parts: Sequence[RawMatrix]) -> Sequence[RawMatrix]:
    if len({part.format for part in parts}) == 1:
        return parts
    return [
        part if part.format is Format.Q8_0 else quantized(pool, _floats_of(pool, part), Format.Q8_0) for part in parts
    ]


def _floats_of(pool: Pool, part: RawMatrix) -> Floats:
    if part.format is Format.F32:
        return part.rows.view(np.float32)
    if part.format is Format.BF16:
        return (part.rows.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
    return unpacked(pool, PackedMatrix(pool, [part]))


def unpacked(pool: Pool, matrix: PackedMatrix) -> Floats:
    """The values of a matrix, `[num_outputs, num_inputs]`."""
    values = np.empty((matrix.c.num_outputs, matrix.c.num_inputs), np.float32)
    pool.library.tl_unpack(matrix.c, values.ctypes.data)
    return values


def quantized(pool: Pool, values: Floats, form: Format) -> RawMatrix:
    """Rows of numbers in a packed format, one of Q4_0, Q4_1 and Q8_0; inputs in whole groups."""
    values = np.ascontiguousarray(values, np.float32)
    num_rows, num_inputs = values.shape
    if num_inputs % GROUP:
        raise UnsupportedWeights(f"rows of {num_inputs} inputs are not whole groups of {GROUP}")
    block = {Format.Q4_0: 18, Format.Q4_1: 20, Format.Q8_0: 34}[form]
    rows = np.empty((num_rows, num_inputs // GROUP * block), np.uint8)
    pool.library.tl_quantize(pool.handle, form, values.ctypes.data, num_rows, num_inputs, rows.ctypes.data)
    return RawMatrix(form, num_inputs, rows)


def raw_floats(values: Floats) -> RawMatrix:
    """Rows of floats as they are."""
    values = np.ascontiguousarray(values, np.float32)
    return RawMatrix(Format.F32, values.shape[1], values.view(np.uint8).reshape(values.shape[0], -1))
