"""Tokenizers for the tests: a tiny one, and the embedded model's, converted once per run into a cache of its own."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.tiny_models import write_tiny_tokenizer
from tokenloom.common.model_files import resolve_model
from tokenloom.tokenizer.assets import TokenizerAssets, load_assets, read_folder


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> TokenizerAssets:
    """A byte-level BPE tokenizer of 512 tokens with a ChatML template."""
    folder = tmp_path_factory.mktemp("tiny-tokenizer")
    write_tiny_tokenizer(folder)
    return read_folder(folder)


@pytest.fixture(scope="session")
def model_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The cache into which `smollm` was converted."""
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="session")
def smollm(model_cache: Path) -> TokenizerAssets:
    """The embedded model's tokenizer and template."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TOKENLOOM_CACHE", str(model_cache))
        return load_assets(resolve_model("embedded"))
