from __future__ import annotations

import json
from pathlib import Path

import pytest

from tokenloom.common import model_files
from tokenloom.common.errors import SetupError
from tokenloom.common.model_files import ModelSource, cached_dir, resolve_model


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TOKENLOOM_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


class Build:
    """Counts how often it had to work."""

    def __init__(self, text: str = "content") -> None:
        self.count = 0
        self.text = text

    def __call__(self, folder: Path) -> None:
        self.count += 1
        (folder / "sub").mkdir()
        (folder / "sub" / "file").write_text(self.text)


def test_an_entry_is_built_once(cache: Path) -> None:
    build = Build()
    first, second = cached_dir("kind", "ab" * 32, build), cached_dir("kind", "ab" * 32, build)
    assert first == second
    assert first.is_relative_to(cache)
    assert (first / "sub" / "file").read_text() == "content"
    assert build.count == 1


@pytest.mark.parametrize("harm", ["truncate", "delete", "change", "manifest", "version", "key"])
def test_a_broken_or_foreign_entry_is_rebuilt(harm: str, monkeypatch: pytest.MonkeyPatch) -> None:
    build = Build()
    folder = cached_dir("kind", "ab" * 32, build)
    file, manifest = folder / "sub" / "file", folder / "manifest.json"
    if harm == "truncate":
        file.write_text("cont")
    elif harm == "delete":
        file.unlink()
    elif harm == "change":
        file.write_text("c0ntent")
    elif harm == "manifest":
        manifest.write_text("{")
    elif harm == "version":
        monkeypatch.setattr(model_files, "__version__", "0.0.0")
    else:
        manifest.write_text(json.dumps({**json.loads(manifest.read_text()), "key": "cd" * 32}))
    assert (cached_dir("kind", "ab" * 32, build) / "sub" / "file").read_text() == "content"
    assert build.count == 2


def test_a_failed_build_leaves_nothing_behind(cache: Path) -> None:
    def fail(folder: Path) -> None:
        (folder / "half").write_text("x")
        raise RuntimeError("no")

    with pytest.raises(RuntimeError, match="no"):
        cached_dir("kind", "ab" * 32, fail)
    assert [p.name for p in (cache / "kind").iterdir() if p.is_dir()] == []


def test_a_cache_that_cannot_be_written_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("TOKENLOOM_CACHE", str(tmp_path / "file"))
    with pytest.raises(SetupError, match="TOKENLOOM_CACHE"):
        cached_dir("kind", "ab" * 32, Build())


def test_a_folder_with_safetensors_is_a_model_named_after_it(tmp_path: Path) -> None:
    folder = tmp_path / "my-model"
    folder.mkdir()
    (folder / "model.safetensors").write_bytes(b"x")
    with pytest.raises(SetupError, match=r"config\.json"):
        resolve_model(str(folder))
    (folder / "config.json").write_text("{}")
    assert resolve_model(str(folder)) == ModelSource("my-model", folder)


def test_a_gguf_is_found_by_its_file_and_by_its_folder(tmp_path: Path) -> None:
    file = tmp_path / "tiny.Q4_0.gguf"
    file.write_bytes(b"GGUF\x03\0\0\0 rest")
    assert resolve_model(str(file)) == ModelSource("tiny.Q4_0", tmp_path, file.name)
    assert resolve_model(str(tmp_path)).gguf_file == file.name
    (tmp_path / "second.gguf").write_bytes(b"GGUF\x03\0\0\0")
    with pytest.raises(SetupError, match="2 GGUF files"):
        resolve_model(str(tmp_path))


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda d: d / "nothing", "no such file or folder"),
        (lambda d: d, "holds no weights"),
        (lambda d: _write(d / "broken.gguf", b"GGXX"), "is no GGUF file"),
        (lambda d: _write(d / "broken.gguf", b"GGUF" + bytes(range(20))), "GGUF version 50462976"),
        (lambda d: _write(d / "empty.gguf", b""), "is no GGUF file"),
        (lambda d: _write(d / "weights.bin", b"x"), "give a .gguf file"),
    ],
)
def test_what_is_no_model_is_refused_in_one_line(tmp_path: Path, make: object, words: str) -> None:
    assert callable(make)
    with pytest.raises(SetupError) as caught:
        resolve_model(str(make(tmp_path)))
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_fingerprints_follow_the_files_content_and_not_their_place(tmp_path: Path) -> None:
    sources = []
    for name, vocabulary in (("a", "v1"), ("b", "v1"), ("c", "v2")):
        folder = tmp_path / name
        folder.mkdir()
        (folder / "config.json").write_text("{}")
        (folder / "model.safetensors").write_bytes(b"weights")
        (folder / "tokenizer.json").write_text(vocabulary)
        sources.append(resolve_model(str(folder)))
    a, b, c = sources
    assert a.tokenizer_fingerprint() == b.tokenizer_fingerprint() != c.tokenizer_fingerprint()
    assert a.weights_fingerprint() == b.weights_fingerprint() == c.weights_fingerprint()
    (b.folder / "model.safetensors").write_bytes(b"Weights")
    assert a.weights_fingerprint() != b.weights_fingerprint()


def test_the_embedded_model_is_a_gguf_in_its_package() -> None:
    source = resolve_model("embedded")
    assert source.model_id == "SmolLM2-135M-Instruct"
    assert source.gguf_file is not None


def _write(path: Path, data: bytes) -> Path:
    path.write_bytes(data)
    return path
