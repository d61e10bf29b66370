"""A GGUF file of the llama architecture as a weight source; packed tensors stay as they are."""

from __future__ import annotations

from typing import Any

import numpy as np

from tokenloom.common.gguf_file import GgufFile, GgufTensor
from tokenloom.executor.native.library import Format
from tokenloom.executor.native.llama import LlamaShape
from tokenloom.executor.native.weights import Floats, RawMatrix, UnsupportedWeights, raw_floats

_PARTS = {
    "q": "attn_q.weight",
    "k": "attn_k.weight",
    "v": "attn_v.weight",
    "o": "attn_output.weight",
    "gate": "ffn_gate.weight",
    "up": "ffn_up.weight",
    "down": "ffn_down.weight",
    "attention_norm": "attn_norm.weight",
    "mlp_norm": "ffn_norm.weight",
}
_WHOLE = {"embedding": "token_embd.weight", "head": "output.weight", "final_norm": "output_norm.weight"}
_ARCHITECTURES = frozenset({"llama"})


class GgufWeights:
    """Weights and shape of a GGUF file.

    llama.cpp turns neighbours of a head by rope's angles, transformers the two halves; files keep the rows of queries
    and keys in llama.cpp's order, and here they get transformers' back.

    Raises: UnsupportedWeights if the file holds another architecture.
    """

    def __init__(self, file: GgufFile) -> None:
        self._file = file
        self._architecture = str(file.fields.get("general.architecture"))
        if self._architecture not in _ARCHITECTURES:
            raise UnsupportedWeights(f"GGUF architecture {self._architecture} is not of the Llama shape")
        if any(key.startswith(f"{self._architecture}.rope.scaling") for key in file.fields):
            raise UnsupportedWeights("its rope is scaled")
        if "rope_freqs.weight" in file.tensors:
            raise UnsupportedWeights("its rope has factors of its own")
        if int(self._field("expert_count", 0)):
            raise UnsupportedWeights("it has experts")
        if unknown := sorted(name for name in file.tensors if not _is_known(name)):
            raise UnsupportedWeights(f"it has weights that the kernels do not know: {unknown[0]}")
        self.shape = self._read_shape()

    def matrix(self, name: str) -> RawMatrix:
        """A matrix of the file. Raises: UnsupportedWeights."""
        tensor = self._tensor(name)
        if tensor is None:
            raise UnsupportedWeights(f"the file has no {name}")
        matrix = _raw(tensor, name)
        part = name.rpartition(".")[2]
        if part in ("q", "k"):
            num_heads = self.shape.num_heads if part == "q" else self.shape.num_kv_heads
            order = np.arange(matrix.num_outputs).reshape(num_heads, -1, 2).swapaxes(1, 2).reshape(-1)
            matrix = matrix.ordered(order)
        return matrix

    def vector(self, name: str) -> Floats | None:
        """A vector of the file, or what is known of it; None if there is none."""
        if name == "is_tied":
            return None if "output.weight" in self._file.tensors else np.ones(1, np.float32)
        tensor = self._tensor(name)
        if tensor is None:
            return None
        if tensor.type_name != "F32":
            raise UnsupportedWeights(f"{name} is of type {tensor.type_name}")
        return np.frombuffer(tensor.data, np.float32)

    def _tensor(self, name: str) -> GgufTensor | None:
        if name in _WHOLE:
            return self._file.tensors.get(_WHOLE[name])
        _, index, part = name.split(".")
        return self._file.tensors.get(f"blk.{index}.{_PARTS[part]}") if part in _PARTS else None

    def _field(self, name: str, default: Any = None) -> Any:
        value = self._file.fields.get(f"{self._architecture}.{name}", default)
        if value is None:
            raise UnsupportedWeights(f"the file does not say {self._architecture}.{name}")
        return value

    def _read_shape(self) -> LlamaShape:
        hidden_size, num_heads = int(self._field("embedding_length")), int(self._field("attention.head_count"))
        num_kv_heads = int(self._field("attention.head_count_kv", num_heads))
        head_dim = int(self._field("attention.key_length", hidden_size // max(1, num_heads)))
        num_layers = int(self._field("block_count"))
        if int(self._field("rope.dimension_count", head_dim)) != head_dim:
            raise UnsupportedWeights("only a part of each head is turned by rope")
        theta = float(self._field("rope.freq_base", 10_000.0))
        exponents = np.arange(0, head_dim, 2, dtype=np.float32) / np.float32(head_dim)
        embedding = self._file.tensors.get(_WHOLE["embedding"])
        if embedding is None:
            raise UnsupportedWeights("the file has no embedding")
        return LlamaShape(
            num_layers=num_layers,
            hidden_size=hidden_size,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            intermediate_size=int(self._field("feed_forward_length")),
            vocab_size=embedding.shape[0],
            norm_eps=float(self._field("attention.layer_norm_rms_epsilon")),
            inv_freq=(1.0 / np.power(np.float32(theta), exponents)).astype(np.float32),
            rope_scale=1.0,
            sliding_windows=(0,) * num_layers,
        )


def _is_known(name: str) -> bool:
    """A tensor that has its place in a layer or in the whole; what is not known must not be left out in silence."""
    prefix, _, rest = name.partition(".")
    return name in _WHOLE.values() or (prefix == "blk" and rest.partition(".")[2] in _PARTS.values())


def _raw(tensor: GgufTensor, name: str) -> RawMatrix:
    num_inputs = tensor.shape[-1]
    if tensor.type_name == "F16":
        return raw_floats(np.frombuffer(tensor.data, np.float16).reshape(-1, num_inputs).astype(np.float32))
    if tensor.type_name not in Format.__members__:
        raise UnsupportedWeights(f"{name} is of type {tensor.type_name}")
    rows = np.frombuffer(tensor.data, np.uint8).reshape(-1, tensor.row_bytes)
    return RawMatrix(Format[tensor.type_name], num_inputs, rows)
