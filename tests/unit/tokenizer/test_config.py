from __future__ import annotations

import pytest

from tokenloom.common.config import parse
from tokenloom.common.errors import SetupError
from tokenloom.tokenizer.config import TokenizerConfig


def read(*argv: str) -> TokenizerConfig:
    return parse(TokenizerConfig, "tokenloom tokenizer", "Text to tokens.", argv)


def test_keys_are_repeatable_flags_or_a_comma_separated_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    assert read("--api-key=a", "--api-key=b").api_key == ("a", "b")
    monkeypatch.setenv("TOKENLOOM_API_KEY", "c, d")
    assert read().api_key == ("c", "d")


def test_sizes_and_addresses_are_read() -> None:
    config = read("--listen=unix:/x.sock", "--scheduler=host:1", "--max-text-bytes=1MiB")
    assert (config.listen, config.scheduler, config.max_text_bytes) == ("unix:/x.sock", "host:1", 1 << 20)


@pytest.mark.parametrize("flag", ["--max-active-choices=0", "--max-text-bytes=much", "--takeover-limit-s=soon"])
def test_a_malformed_value_names_its_setting(flag: str) -> None:
    with pytest.raises(SetupError, match=flag.split("=", maxsplit=1)[0]):
        read(flag)
