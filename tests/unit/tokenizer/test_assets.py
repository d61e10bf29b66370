from __future__ import annotations

import json
import logging
import subprocess
import sys
from pathlib import Path

import pytest

from tests.tiny_models import write_tiny_tokenizer
from tokenloom.common.errors import SetupError
from tokenloom.common.model_files import ModelSource, resolve_model
from tokenloom.tokenizer import assets as assets_module
from tokenloom.tokenizer.assets import TokenizerAssets, load_assets, read_folder
from tokenloom.tokenizer.gguf_tokenizer import read_metadata

READ_ONLY = """
import sys
from pathlib import Path
from tokenloom.common.model_files import ModelSource
from tokenloom.tokenizer.assets import load_assets
assets = load_assets(ModelSource("m", Path(sys.argv[1])))
assert assets.tokenizer.encode("hello").ids
heavy = {"transformers", "torch", "numpy"} & set(sys.modules)
sys.exit(f"imported {heavy}" if heavy else 0)
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_tiny_tokenizer(tmp_path)
    return tmp_path


def configure(folder: Path, **changes: object) -> TokenizerAssets:
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    return read_folder(folder)


def test_a_folder_with_tokenizer_json_is_read_without_heavy_imports(folder: Path) -> None:
    subprocess.run([sys.executable, "-c", READ_ONLY, str(folder)], check=True, timeout=60)


def test_special_tokens_and_template_are_found(folder: Path) -> None:
    assets = read_folder(folder)
    assert assets.special_tokens["eos_token"] == "<|im_end|>"
    assert assets.special_token_ids == {0, 1, 2}
    assert assets.special_token_texts == ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
    assert "<|im_start|>" in assets.chat_templates["default"]


def test_tokens_written_as_objects_and_named_templates_are_understood(folder: Path) -> None:
    templates = [{"name": "default", "template": "a"}, {"name": "tool_use", "template": "b"}]
    assets = configure(folder, bos_token={"content": "<s>", "special": True}, chat_template=templates)
    assert assets.special_tokens["bos_token"] == "<s>"
    assert assets.chat_templates == {"default": "a", "tool_use": "b"}


def test_the_template_file_beats_the_configuration(folder: Path) -> None:
    (folder / "chat_template.jinja").write_text("from the file")
    assert read_folder(folder).chat_templates == {"default": "from the file"}


def test_a_model_without_a_template_has_none(folder: Path) -> None:
    assert configure(folder, chat_template=None).chat_templates == {}


def test_truncation_and_padding_in_the_file_are_switched_off(folder: Path) -> None:
    tokenizer = read_folder(folder).tokenizer
    tokenizer.enable_truncation(3)
    tokenizer.enable_padding(length=5)
    tokenizer.save(str(folder / "tokenizer.json"))
    read = read_folder(folder).tokenizer
    assert len(read.encode("one two three four five six").ids) > 5
    assert len(read.encode("a").ids) == 1


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json"])
def test_a_broken_file_is_named(folder: Path, name: str) -> None:
    (folder / name).write_text("{")
    with pytest.raises(SetupError, match=name):
        read_folder(folder)


def test_a_folder_without_a_tokenizer_is_a_clear_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOKENLOOM_CACHE", str(tmp_path / "cache"))
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(SetupError, match="holds no tokenizer"):
        load_assets(ModelSource("m", tmp_path))


def test_what_transformers_cannot_read_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(source: ModelSource, folder: Path) -> None:
        raise ValueError("first line\nsecond line")

    monkeypatch.setenv("TOKENLOOM_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(assets_module, "_convert_by_transformers", fail)
    (tmp_path / "tokenizer.model").write_text("no SentencePiece")
    with pytest.raises(SetupError, match=r"no usable tokenizer: first line$"):
        load_assets(ModelSource("m", tmp_path))


def test_the_embedded_model_is_converted_once_and_silently(
    smollm: TokenizerAssets,
    model_cache: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    def convert_again(source: ModelSource, folder: Path) -> None:
        raise AssertionError("converted twice")

    monkeypatch.setenv("TOKENLOOM_CACHE", str(model_cache))
    monkeypatch.setattr(assets_module, "_convert", convert_again)
    caplog.set_level(logging.INFO)
    again = load_assets(resolve_model("embedded"))
    assert again.tokenizer.to_str() == smollm.tokenizer.to_str()
    assert again.special_tokens["eos_token"] == "<|im_end|>"
    assert again.chat_templates.keys() == {"default"}
    assert capfd.readouterr() == ("", "")
    assert not caplog.records


def test_conversion_says_one_line_and_lets_the_library_say_nothing(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    assets_module._convert(resolve_model("embedded"), tmp_path)
    assert read_folder(tmp_path).tokenizer.encode("<|im_end|>").ids == [2]
    assert capfd.readouterr() == ("", "")
    assert [record.name for record in caplog.records] == [assets_module.__name__]


@pytest.mark.parametrize("content", [b"", b"GGML" + bytes(64), b"GGUF" + bytes([9]) + bytes(64), None])
def test_a_broken_gguf_file_is_a_clear_error(tmp_path: Path, content: bytes | None) -> None:
    path = tmp_path / "model.gguf"
    if content is None:  # cut off in the middle of the vocabulary
        source = resolve_model("embedded")
        assert source.gguf_file is not None
        with (source.folder / source.gguf_file).open("rb") as file:
            content = file.read(100_000)
    path.write_bytes(content)
    with pytest.raises(SetupError, match="no usable GGUF file"):
        read_metadata(path)
