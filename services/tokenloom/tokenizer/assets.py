"""What the stage needs of a model's files: the tokenizer, its special tokens, the chat template.

A folder with tokenizer.json is read by the tokenizers library alone. Anything else (a vocabulary inside a GGUF file,
SentencePiece) is converted once by transformers, whose import and conversion take seconds, and kept in the cache.
"""

from __future__ import annotations

import contextlib
import io
import json
import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from tokenloom.common.config import set_default_env
from tokenloom.common.errors import SetupError
from tokenloom.common.model_files import ModelSource, cached_dir
from tokenloom.tokenizer.gguf_tokenizer import convert_gguf_tokenizer

log = logging.getLogger(__name__)
DEFAULT_TEMPLATE = "default"
_CONVERTIBLE_FILES = (
    "tokenizer.model",
    "spiece.model",
    "tekken.json",
    "vocab.json",
    "vocab.txt",
    "tokenizer_config.json",
)


@dataclass(frozen=True)
class TokenizerAssets:
    """A model's tokenizer.

    Args:
        tokenizer: without truncation and padding.
        special_tokens: named ones (`bos_token`, ...) as templates use them.
        special_token_ids: ids of all special tokens.
        chat_templates: Jinja sources by name; empty if the model has none.
    """

    tokenizer: Tokenizer
    special_tokens: Mapping[str, str]
    special_token_ids: frozenset[int]
    chat_templates: Mapping[str, str]

    @property
    def special_token_texts(self) -> tuple[str, ...]:
        """How the special tokens are written."""
        added = self.tokenizer.get_added_tokens_decoder()
        return tuple(added[i].content for i in sorted(self.special_token_ids))


def load_assets(source: ModelSource) -> TokenizerAssets:
    """Read a model's tokenizer, converting it first if need be.

    Raises: SetupError that says what is missing or broken.
    """
    if source.gguf_file is None and (source.folder / "tokenizer.json").is_file():
        return read_folder(source.folder)
    return read_folder(cached_dir("tokenizer", source.tokenizer_fingerprint(), lambda folder: _convert(source, folder)))


def read_folder(folder: Path) -> TokenizerAssets:
    """Read tokenizer.json and what stands beside it.

    Raises: SetupError naming the broken file.
    """
    path = folder / "tokenizer.json"
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises bare Exceptions
        raise SetupError(f"{path} cannot be read: {error}") from None
    tokenizer.no_truncation()
    tokenizer.no_padding()
    config = _read_json(folder / "tokenizer_config.json")
    special = _named_tokens(_read_json(folder / "special_tokens_map.json")) | _named_tokens(config)
    added = tokenizer.get_added_tokens_decoder()
    return TokenizerAssets(
        tokenizer=tokenizer,
        special_tokens=special,
        special_token_ids=frozenset(i for i, token in added.items() if token.special),
        chat_templates=_chat_templates(folder, config),
    )


def plain_copy(tokenizer: Tokenizer) -> Tokenizer:
    """A copy that takes the names of special tokens for ordinary text."""
    copy = Tokenizer.from_str(tokenizer.to_str())
    copy.encode_special_tokens = True
    return copy


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise SetupError(f"{path} cannot be read: {error}") from None
    if not isinstance(content, dict):
        raise SetupError(f"{path} holds no JSON object")
    return content


def _named_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    """Entries such as `"bos_token": "<s>"` or `"bos_token": {"content": "<s>", ...}`."""
    found = {}
    for name, value in config.items():
        content = value.get("content") if isinstance(value, dict) else value
        if name.endswith("_token") and isinstance(content, str):
            found[name] = content
    return found


def _chat_templates(folder: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """Templates by name, from chat_template.jinja, else from the configuration (one text, or a list of named ones)."""
    path = folder / "chat_template.jinja"
    if path.is_file():
        return {DEFAULT_TEMPLATE: path.read_text(encoding="utf-8")}
    inline = config.get("chat_template") or _read_json(folder / "chat_template.json").get("chat_template")
    if isinstance(inline, str):
        return {DEFAULT_TEMPLATE: inline}
    if isinstance(inline, list):
        return {entry["name"]: entry["template"] for entry in inline}
    return {}


def _convert(source: ModelSource, folder: Path) -> None:
    """Write tokenizer.json and its companions into `folder`, by transformers."""
    if source.gguf_file is None and not any((source.folder / name).is_file() for name in _CONVERTIBLE_FILES):
        raise SetupError(f"{source.folder} holds no tokenizer (tokenizer.json or tokenizer.model); copy it there")
    log.info("converting the tokenizer of %s; once, some seconds", source.model_id)
    with _quiet_transformers():
        try:
            _convert_by_transformers(source, folder)
        except SetupError:
            raise
        except Exception as error:  # transformers raises many kinds; each means that there is no usable tokenizer
            reason = (str(error).splitlines() or [type(error).__name__])[0]
            raise SetupError(f"{source.folder} has no usable tokenizer: {reason}") from None
    if not (folder / "tokenizer.json").is_file():
        raise SetupError(f"{source.folder}: its tokenizer has no fast form (tokenizer.json), which Tokenloom needs")


def _convert_by_transformers(source: ModelSource, folder: Path) -> None:
    if source.gguf_file is not None:
        with contextlib.suppress(ImportError):  # an older transformers, which reads GGUF files with torch only
            convert_gguf_tokenizer(source.folder / source.gguf_file, folder)
            return
    from transformers import AutoTokenizer

    options = {"gguf_file": source.gguf_file} if source.gguf_file else {}
    tokenizer = AutoTokenizer.from_pretrained(str(source.folder), local_files_only=True, **options)
    tokenizer.save_pretrained(str(folder))


@contextlib.contextmanager
def _quiet_transformers() -> Iterator[None]:
    """Keep the library's progress bars, advice and warnings out of our logs."""
    set_default_env("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    set_default_env("TQDM_DISABLE", "1")
    set_default_env("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    output = io.StringIO()
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
        from transformers.utils import logging as transformers_logging

        transformers_logging.set_verbosity_error()  # type: ignore[no-untyped-call]
        yield
    if output.getvalue().strip():
        log.debug("transformers said: %s", output.getvalue().strip())
