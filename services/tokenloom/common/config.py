"""Settings: frozen dataclasses, read once from flags and `TOKENLOOM_*` variables.

A service declares one dataclass whose fields are made by `setting()`. A field that is itself such a dataclass is
composed in: its fields become flags of the same program. A flag beats its environment twin, which beats the default.

    @dataclass(frozen=True)
    class GatewayConfig:
        process: ProcessSettings
        max_body_bytes: int = setting(16 << 20, "Largest request body.", parse=parse_bytes)

    config = parse(GatewayConfig, "tokenloom gateway", "HTTP in OpenAI format.", argv)

This is the only module that reads or writes the environment.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import os
import re
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from tokenloom.common.errors import SetupError

T = TypeVar("T")
Parser = Callable[[str], Any]
_UNITS = {"": 1, "b": 1, "kib": 1 << 10, "mib": 1 << 20, "gib": 1 << 30, "kb": 10**3, "mb": 10**6, "gb": 10**9}


def setting(
    default: Any,
    help: str,
    *,
    parse: Parser | None = None,
    choices: Sequence[str] = (),
    secret: bool = False,
    form: str = "",
    hidden: bool = False,
    positional: bool = False,
) -> Any:
    """Declare a dataclass field as a setting.

    Args:
        default: value without flag and variable. A tuple makes the flag repeatable (its variable: comma separated).
        help: one line for people, with the unit.
        parse: text to value; raises ValueError on malformed text. Default: by the type of `default`.
        choices: the accepted words.
        secret: the value is not shown in help or errors.
        form: the accepted form, for error messages.
        hidden: not for people; left out of the help.
        positional: an argument without a flag and without a variable; `default` is not used, it must be given.
    """
    info = {"help": help, "parse": parse, "choices": tuple(choices), "secret": secret, "form": form, "hidden": hidden}
    info["positional"] = positional
    return dataclasses.field(default=default, metadata={"setting": info})


def parse_bytes(text: str) -> int:
    """Read a size such as `1GiB`, `512 MiB` or `4096` (bytes)."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]*)\s*", text)
    if match is None or match[2].lower() not in _UNITS:
        raise ValueError("a size such as 1GiB, 512MiB or 4096")
    return int(float(match[1]) * _UNITS[match[2].lower()])


def parse_bool(text: str) -> bool:
    """Read `true`/`false` and their usual spellings."""
    word = text.strip().lower()
    if word in ("1", "true", "yes", "on"):
        return True
    if word in ("0", "false", "no", "off"):
        return False
    raise ValueError("true or false")


def positive_int(text: str) -> int:
    """Read a whole number of at least 1."""
    if (value := int(text)) < 1:
        raise ValueError
    return value


def non_negative_int(text: str) -> int:
    """Read a whole number of at least 0."""
    if (value := int(text)) < 0:
        raise ValueError
    return value


def port_number(text: str) -> int:
    """Read a TCP port, 1 to 65535."""
    if not 1 <= (value := int(text)) <= 65535:
        raise ValueError
    return value


def optional_port_number(text: str) -> int:
    """Read a TCP port, or 0 for none."""
    return 0 if text.strip() == "0" else port_number(text)


def positive_seconds(text: str) -> float:
    """Read a finite time above 0 s."""
    if not 0 < (value := float(text)) < math.inf:
        raise ValueError
    return value


def non_negative_seconds(text: str) -> float:
    """Read a finite time of at least 0 s."""
    if not 0 <= (value := float(text)) < math.inf:
        raise ValueError
    return value


def parse_api_key(text: str) -> str:
    """Read a key. An empty one would open the interface to everybody, and a comma parts keys in a variable."""
    if not text or text != text.strip() or "," in text:
        raise ValueError
    return text


@dataclass(frozen=True)
class ProcessSettings:
    """What every stage's process is told."""

    metrics_listen: str = setting("", "Where to serve Prometheus metrics: host:port or unix:PATH; empty: nowhere.")
    log_level: str = setting("info", "Least severe messages to log.", choices=("debug", "info", "warning", "error"))
    log_format: str = setting("console", "How log lines are written.", choices=("console", "json"))
    cluster_token: str = setting("", "Credential between stages; empty: stages trust their callers.", secret=True)
    otlp_endpoint: str = setting("", "OpenTelemetry collector (gRPC, http://host:4317); empty: no export.")
    grace_s: float = setting(
        30.0, "Seconds that running requests get to finish after SIGTERM.", parse=non_negative_seconds
    )
    parent_fd: int = setting(-1, "Inherited pipe; the stage stops when its other end closes.", hidden=True)


def parse(cls: type[T], prog: str, description: str, argv: Sequence[str]) -> T:
    """Read the settings of dataclass `cls` from `argv` and the environment.

    Raises: SetupError naming the setting, the value and the accepted form.
    """
    parser = _Parser(prog, _usage(cls, prog), description, formatter_class=_HelpFormatter, allow_abbrev=False)
    for name, info, default in _settings_of(cls):
        _add_flag(parser, name, info, default)
    given = vars(parser.parse_args(list(argv)))
    return _build(cls, given, os.environ)


def _usage(cls: type[Any], prog: str) -> str:
    return " ".join([prog, *(name.upper() for name, info, _ in _settings_of(cls) if info["positional"]), "[options]"])


def _settings_of(cls: type[Any]) -> list[tuple[str, dict[str, Any], Any]]:
    """All settings of `cls`, its own before composed ones: (field name, its info, default)."""
    own: list[tuple[str, dict[str, Any], Any]] = []
    composed: list[tuple[str, dict[str, Any], Any]] = []
    hints = typing.get_type_hints(cls)
    for field in dataclasses.fields(cls):
        if dataclasses.is_dataclass(hints[field.name]):
            composed += _settings_of(typing.cast("type[Any]", hints[field.name]))
        else:
            own.append((field.name, field.metadata["setting"], field.default))
    return own + composed


def _add_flag(parser: argparse.ArgumentParser, name: str, info: dict[str, Any], default: Any) -> None:
    if info["positional"]:
        parser.add_argument(name, metavar=name.upper(), help=info["help"])
        return
    shown = "" if info["secret"] or default in ("", (), -1) else f"default {default}; "
    words = f" One of: {', '.join(info['choices'])}." if info["choices"] else ""
    repeat = " Repeatable." if isinstance(default, tuple) else ""
    text = f"{info['help']}{words}{repeat} ({shown}{env_name(name)})"
    parser.add_argument(
        "--" + name.replace("_", "-"),
        dest=name,
        metavar=_metavar(info, default),
        action="append" if isinstance(default, tuple) else "store",
        nargs="?" if isinstance(default, bool) else None,
        const="true" if isinstance(default, bool) else None,
        help=argparse.SUPPRESS if info["hidden"] else text.replace("%", "%%"),
    )


def _metavar(info: dict[str, Any], default: Any) -> str:
    if info["choices"]:
        return "WORD"
    if info["parse"] is parse_bytes:
        return "SIZE"
    return {bool: "BOOL", int: "N", float: "NUMBER"}.get(type(default), "TEXT")


def _build(cls: type[T], given: Mapping[str, Any], environ: Mapping[str, str]) -> T:
    values: dict[str, Any] = {}
    hints = typing.get_type_hints(cls)
    for field in dataclasses.fields(typing.cast(Any, cls)):
        hint = hints[field.name]
        if dataclasses.is_dataclass(hint):
            values[field.name] = _build(typing.cast("type[Any]", hint), given, environ)
        else:
            values[field.name] = _read(field.name, field.metadata["setting"], field.default, given, environ)
    return cls(**values)


def _read(name: str, info: dict[str, Any], default: Any, given: Mapping[str, Any], environ: Mapping[str, str]) -> Any:
    source, text = "--" + name.replace("_", "-"), given[name]
    if info["positional"]:
        return _convert(name.upper(), info, default, str(text))
    if text is None and (text := environ.get(env_name(name))) is not None:
        source = env_name(name)
        if isinstance(default, tuple):
            parts = [part.strip() for part in text.split(",")]
            text = parts if info["parse"] else [part for part in parts if part]
    if text is None:
        return default
    if isinstance(text, list):
        return tuple(_convert(source, info, "", part) for part in text)
    return _convert(source, info, default, text)


def _convert(source: str, info: dict[str, Any], default: Any, text: str) -> Any:
    if info["choices"]:
        if text not in info["choices"]:
            raise SetupError(f"{source}: {text!r} is not one of {', '.join(info['choices'])}")
        return text
    convert: Parser = info["parse"] or (parse_bool if isinstance(default, bool) else type(default))
    try:
        return convert(text)
    except ValueError as error:
        shown = "the given value" if info["secret"] else repr(text)
        form = info["form"] or _accepted_form(convert) or str(error)
        raise SetupError(f"{source}: {shown} is not accepted; expected {form}") from None


def _accepted_form(convert: Parser) -> str:
    forms: dict[Any, str] = {
        int: "a whole number",
        float: "a number",
        positive_int: "a whole number of at least 1",
        non_negative_int: "a whole number of at least 0",
        port_number: "a port, 1 to 65535",
        optional_port_number: "a port, 1 to 65535, or 0 for none",
        positive_seconds: "a number of seconds above 0",
        non_negative_seconds: "a number of seconds of at least 0",
        parse_api_key: "a key without commas or blanks around it, not an empty one",
    }
    return forms.get(convert, "")


def env_name(name: str) -> str:
    """The environment twin of a setting."""
    return "TOKENLOOM_" + name.upper()


def cache_root() -> Path:
    """Folder of converted models and verdicts: `TOKENLOOM_CACHE`, else `~/.cache/tokenloom`."""
    return Path(os.environ.get("TOKENLOOM_CACHE") or Path.home() / ".cache" / "tokenloom")


def set_default_env(name: str, value: str) -> None:
    """Set an environment variable that a library reads when it is imported, unless the user set it."""
    os.environ.setdefault(name, value)


def child_environ(**changes: str) -> dict[str, str]:
    """This process's environment for a child, with `changes`."""
    return {**os.environ, **changes}


class _HelpFormatter(argparse.HelpFormatter):
    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=34, width=110)


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise SetupError(f"{message}; see {self.prog} --help")
