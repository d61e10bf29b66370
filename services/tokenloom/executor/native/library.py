"""The compiled kernels, through ctypes: structures as src/tokenloom.h has them, and the few calls that Python makes.

A step is one call, during which the GIL is free. The library is an optional part of the installation; where no compiler
was, `load_library` says so and the torch path serves.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from ctypes import POINTER, Structure, c_char_p, c_float, c_int32, c_int64, c_void_p
from enum import IntEnum
from pathlib import Path
from typing import Any

_ABI_VERSION = 1
GROUP = 32
"""Inputs that share a scale in packed formats; the inputs of every matrix are a multiple of it."""


class Format(IntEnum):
    """How a matrix is kept; see `TlFormat`."""

    F32 = 0
    BF16 = 1
    Q4_0 = 2
    Q4_1 = 3
    Q8_0 = 4


class Matrix(Structure):
    """`TlMatrix`."""

    _fields_ = (
        ("data", c_void_p),
        ("format", c_int32),
        ("num_outputs", c_int32),
        ("num_inputs", c_int32),
        ("input_bits", c_int32),
        ("bias", c_void_p),
    )


class Layer(Structure):
    """`TlLayer`."""

    _fields_ = (
        ("qkv", Matrix),
        ("out", Matrix),
        ("gate_up", Matrix),
        ("down", Matrix),
        ("attention_norm", c_void_p),
        ("mlp_norm", c_void_p),
        ("query_norm", c_void_p),
        ("key_norm", c_void_p),
        ("sliding_window", c_int32),
        ("attention_scale", c_float),
    )


class Model(Structure):
    """`TlModel`."""

    _fields_ = (
        ("num_layers", c_int32),
        ("hidden_size", c_int32),
        ("num_heads", c_int32),
        ("num_kv_heads", c_int32),
        ("head_dim", c_int32),
        ("intermediate_size", c_int32),
        ("norm_eps", c_float),
        ("layers", POINTER(Layer)),
        ("embedding", Matrix),
        ("head", Matrix),
        ("final_norm", c_void_p),
        ("inv_freq", c_void_p),
        ("rope_scale", c_float),
    )


class Cache(Structure):
    """`TlCache`."""

    _fields_ = (
        ("keys", POINTER(c_void_p)),
        ("values", POINTER(c_void_p)),
        ("is_bf16", c_int32),
        ("block_size", c_int32),
    )


class Step(Structure):
    """`TlStep`."""

    _fields_ = (
        ("num_tokens", c_int32),
        ("num_rows", c_int32),
        ("token_ids", c_void_p),
        ("cu_seqlens_q", c_void_p),
        ("seq_lens", c_void_p),
        ("block_table", c_void_p),
        ("max_blocks", c_int32),
    )


class LibraryMissing(Exception):
    """The kernels were not compiled, or for another version of this code; the message says what to do."""


_MATRIX, _MODEL, _CACHE, _STEP = POINTER(Matrix), POINTER(Model), POINTER(Cache), POINTER(Step)
_SIGNATURES: dict[str, tuple[Any, Sequence[Any]]] = {
    "tl_abi_version": (c_int32, ()),
    "tl_isa": (c_char_p, ()),
    "tl_choose_isa": (c_int32, (c_char_p,)),
    "tl_pool_create": (c_void_p, (c_int32,)),
    "tl_pool_destroy": (None, (c_void_p,)),
    "tl_packed_bytes": (c_int64, (c_int32, c_int32, c_int32)),
    "tl_pack": (None, (c_void_p, c_int32, c_void_p, c_int32, c_int32, c_void_p)),
    "tl_quantize": (None, (c_void_p, c_int32, c_void_p, c_int32, c_int32, c_void_p)),
    "tl_unpack": (None, (_MATRIX, c_void_p)),
    "tl_linear": (None, (c_void_p, _MATRIX, c_void_p, c_int32, c_void_p)),
    "tl_attention": (
        None,
        (c_void_p, _MODEL, c_int32, _CACHE, _STEP, c_void_p, c_void_p, c_void_p, c_void_p),
    ),
    "tl_hidden_states": (c_int32, (c_void_p, _MODEL, _CACHE, _STEP, c_void_p, c_void_p)),
    "tl_logits": (None, (c_void_p, _MODEL, c_void_p, c_int32, c_void_p)),
}


@functools.cache
def load_library() -> ctypes.CDLL:
    """The kernels, with signatures.

    Raises: LibraryMissing.
    """
    found = sorted(Path(__file__).parent.glob("_kernels*.so"))
    if not found:
        raise LibraryMissing("the CPU kernels were not compiled; install a C++ compiler and tokenloom again")
    try:
        library = ctypes.CDLL(str(found[0]))
        library.tl_abi_version.restype = c_int32
        version = library.tl_abi_version()
    except (OSError, AttributeError) as error:
        raise LibraryMissing(f"the CPU kernels cannot be loaded ({error}); install tokenloom again") from None
    if version != _ABI_VERSION:
        raise LibraryMissing("the CPU kernels are of another version; install tokenloom again")
    for name, (result, arguments) in _SIGNATURES.items():
        function = getattr(library, name)
        function.restype, function.argtypes = result, list(arguments)
    return library


class Pool:
    """Threads of the kernels. One caller at a time.

    Args:
        num_threads: at least 1; the caller is one of them.
    """

    def __init__(self, num_threads: int) -> None:
        self.library = load_library()
        self.handle: int | None = self.library.tl_pool_create(num_threads)
        if not self.handle:
            raise MemoryError("no memory for the kernels' threads")

    def close(self) -> None:
        """End the threads."""
        if self.handle:
            self.library.tl_pool_destroy(self.handle)
            self.handle = None
