"""The tokenizer inside a GGUF file, without torch and without reading the weights.

transformers builds the tokenizer from the file's metadata; its own reader of that metadata imports torch, which this
stage does not need. So the metadata is read by our own, and only the building is transformers'.

Source: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md (layout of the file, names of the entries);
`get_gguf_tokenizer` in transformers, integrations/gguf/gguf_tokenizer_mapping.py (which entries mean what).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tokenloom.common.errors import SetupError
from tokenloom.common.gguf_file import GgufError, GgufFile

_NAMED_TOKENS = {
    "bos_token": "bos_token_id",
    "eos_token": "eos_token_id",
    "unk_token": "unknown_token_id",
    "pad_token": "padding_token_id",
}


def read_metadata(path: Path) -> dict[str, Any]:
    """The key-value entries at the head of a GGUF file (version 2 or 3).

    Raises: SetupError if the file is broken.
    """
    try:
        return GgufFile(path, wanted_arrays=None).fields
    except (OSError, GgufError) as error:
        raise SetupError(f"{path} is no usable GGUF file ({error}); download it again") from None


def convert_gguf_tokenizer(path: Path, folder: Path) -> None:
    """Write tokenizer.json, tokenizer_config.json and the chat template of a GGUF file into `folder`.

    Raises: SetupError if the file is broken or holds no tokenizer; what transformers raises on one it does not know;
        ImportError if this transformers has no builder of its own.
    """
    from transformers import PreTrainedTokenizerFast
    from transformers.integrations.gguf import convert_gguf_tokenizer as build  # type: ignore[attr-defined]

    metadata = read_metadata(path)
    tokens = metadata.get("tokenizer.ggml.tokens")
    if not tokens:
        raise SetupError(f"{path} holds no tokenizer")
    backend, extra = build(metadata["general.architecture"], _vocabulary(metadata))
    config = {
        **_config(metadata),
        **{
            name: tokens[token_id]
            for name, key in _NAMED_TOKENS.items()
            if (token_id := metadata.get(f"tokenizer.ggml.{key}")) is not None
        },
    }
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, **config, **extra)  # type: ignore[no-untyped-call]
    tokenizer.save_pretrained(str(folder))


def _vocabulary(metadata: dict[str, Any]) -> dict[str, Any]:
    """The entries that say how to cut text, by transformers' names."""
    names = {
        "model": "tokenizer_type",
        "pre": "pre_tokenizer_type",
        "unknown_token_id": "unk_token_id",
        "padding_token_id": "pad_token_id",
        "add_space_prefix": "add_prefix_space",
    }
    same = ("tokens", "scores", "token_type", "merges", "precompiled_charsmap", "bos_token_id", "eos_token_id")
    wanted = names | {name: name for name in same}
    return {ours: metadata[key] for name, ours in wanted.items() if (key := f"tokenizer.ggml.{name}") in metadata}


def _config(metadata: dict[str, Any]) -> dict[str, Any]:
    """What goes into tokenizer_config.json, with llama.cpp's rule that SentencePiece vocabularies begin with BOS."""
    names = {
        "ggml.add_bos_token": "add_bos_token",
        "ggml.add_eos_token": "add_eos_token",
        "chat_template": "chat_template",
    }
    config = {ours: metadata[key] for name, ours in names.items() if (key := f"tokenizer.{name}") in metadata}
    if metadata.get("tokenizer.ggml.model") == "llama":
        config.setdefault("add_bos_token", True)
    return config
