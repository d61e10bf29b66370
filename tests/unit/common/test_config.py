from __future__ import annotations

from dataclasses import dataclass

import pytest

from tokenloom.common.config import (
    ProcessSettings,
    optional_port_number,
    parse,
    parse_api_key,
    parse_bytes,
    positive_int,
    positive_seconds,
    setting,
)
from tokenloom.common.errors import SetupError


@dataclass(frozen=True)
class Settings:
    process: ProcessSettings
    max_num_seqs: int = setting(64, "Rows.", parse=positive_int)
    ratio: float = setting(0.5, "Share.")
    cache: int = setting(1 << 30, "Memory.", parse=parse_bytes)
    is_fast: bool = setting(False, "Hurry.")
    kind: str = setting("a", "Which.", choices=("a", "b"))
    api_key: tuple[str, ...] = setting((), "Keys.", secret=True)
    key: tuple[str, ...] = setting((), "Keys.", parse=parse_api_key, secret=True)
    port: int = setting(0, "Port.", parse=optional_port_number)
    limit_s: float = setting(1.0, "Limit.", parse=positive_seconds)
    secret_number: int = setting(0, "Hidden.", secret=True)


def read(*argv: str) -> Settings:
    return parse(Settings, "prog", "A program.", argv)


def test_a_flag_beats_its_environment_twin_which_beats_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    assert read().max_num_seqs == 64
    monkeypatch.setenv("TOKENLOOM_MAX_NUM_SEQS", "7")
    assert read().max_num_seqs == 7
    assert read("--max-num-seqs", "3").max_num_seqs == 3
    assert read("--max-num-seqs=2").max_num_seqs == 2


def test_composed_settings_are_flags_of_the_same_program(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOKENLOOM_LOG_FORMAT", "json")
    settings = read("--grace-s", "1.5")
    assert settings.process == ProcessSettings(log_format="json", grace_s=1.5)


def test_repeatable_settings_come_from_several_flags_or_a_comma_list(monkeypatch: pytest.MonkeyPatch) -> None:
    assert read("--api-key", "a", "--api-key", "b").api_key == ("a", "b")
    monkeypatch.setenv("TOKENLOOM_API_KEY", "c, d,")
    assert read().api_key == ("c", "d")


@pytest.mark.parametrize(("text", "size"), [("1GiB", 1 << 30), ("512 MiB", 512 << 20), ("4096", 4096), ("1.5kb", 1500)])
def test_sizes_have_units(text: str, size: int) -> None:
    assert read("--cache", text).cache == size


@pytest.mark.parametrize(("argv", "value"), [(["--is-fast"], True), (["--is-fast", "false"], False), ([], False)])
def test_switches_take_a_word_or_none(argv: list[str], value: bool) -> None:
    assert read(*argv).is_fast is value


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--max-num-seqs", "x"], ["--max-num-seqs", "'x'", "at least 1"]),
        (["--max-num-seqs", "0"], ["--max-num-seqs", "'0'", "at least 1"]),
        (["--ratio", "much"], ["--ratio", "'much'", "a number"]),
        (["--cache", "1 parsec"], ["--cache", "1 parsec", "1GiB"]),
        (["--kind", "c"], ["--kind", "'c'", "a, b"]),
        (["--is-fast", "maybe"], ["--is-fast", "'maybe'", "true or false"]),
        (["--port", "70000"], ["--port", "'70000'", "1 to 65535"]),
        (["--limit-s", "nan"], ["--limit-s", "'nan'", "above 0"]),
        (["--limit-s", "inf"], ["--limit-s", "'inf'", "above 0"]),
        (["--limit-s", "0"], ["--limit-s", "'0'", "above 0"]),
        (["--grace-s", "-1"], ["--grace-s", "'-1'", "at least 0"]),
        (["--key", ""], ["--key", "not an empty one"]),
        (["--key", "a,b"], ["--key", "without commas"]),
        (["--unknown", "1"], ["--unknown", "--help"]),
    ],
)
def test_a_malformed_value_names_setting_value_and_form(argv: list[str], words: list[str]) -> None:
    with pytest.raises(SetupError) as caught:
        read(*argv)
    assert all(word in str(caught.value) for word in words), str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_malformed_variable_is_named_by_its_own_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOKENLOOM_RATIO", "much")
    with pytest.raises(SetupError, match="TOKENLOOM_RATIO"):
        read()


def test_an_empty_key_in_the_environment_does_not_open_the_interface(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOKENLOOM_KEY", "")
    with pytest.raises(SetupError, match="TOKENLOOM_KEY"):
        read()


def test_a_secret_is_not_shown_in_an_error() -> None:
    with pytest.raises(SetupError) as caught:
        read("--secret-number", "hunter2")
    assert "hunter2" not in str(caught.value)


def test_help_names_every_setting_with_default_and_variable(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        read("--help")
    assert caught.value.code == 0
    text = capsys.readouterr().out
    for word in ("--max-num-seqs", "default 64", "TOKENLOOM_MAX_NUM_SEQS", "--grace-s", "One of: a, b."):
        assert word in text
    assert "--parent-fd" not in text
