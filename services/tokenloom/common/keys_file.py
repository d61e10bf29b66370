"""The keys file: which keys there are, whose they are and what their tenants may have.

    [[key]]
    sha256 = "2c26b46b68ffc68ff99b453c1d30413413422d706483bfa0f98a5e886266e7ae"  # printf %s KEY | sha256sum
    tenant = "team-a"
    highest_class = 1               # 0, the most urgent, if left out
    scopes = ["inference"]          # this if left out; "control" is for operators

    [tenant.team-a]                 # may be left out, and so may each limit
    weight = 2.0                    # share of the engine while others wait, relative to theirs
    max_running = 8                 # requests that run at once; more wait
    max_queued = 64                 # requests that wait; more are refused
    tokens_per_minute = 60000       # prompt and output; requests beyond it are refused

The file holds digests and no keys, so others may read it. It is read strictly: a misspelt limit must not become no
limit. No message quotes what stands for a digest, since it might be a key.
"""

from __future__ import annotations

import enum
import re
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from tokenloom.common.errors import SetupError

T = TypeVar("T")
MAX_KEYS = 4096  # each look-up compares them all: about 0.4 ms for so many
_MAX_FILE_BYTES = 4 << 20
_MAX_U32 = (1 << 32) - 1
MIN_WEIGHT, MAX_WEIGHT = 0.001, 1000.0
_DIGEST = re.compile(r"[0-9a-fA-F]{64}")
# No slash: tenant and request id, tenant and cache salt are joined by one.
_TENANT = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_TENANT_FORM = "1 to 64 letters, digits, dots, underscores and dashes, a letter or digit first"
_COUNT_FORM = f"a whole number from 1 to {_MAX_U32}"


class Scope(enum.Enum):
    """What a key may be used for, beside asking which models are served."""

    INFERENCE = "inference"
    """Generate text, and what belongs to it: encode, decode, render."""
    CONTROL = "control"
    """Steer the server."""


@dataclass(frozen=True, slots=True)
class Tenant:
    """Who is charged and what it may have; None is no limit but the engine's own."""

    name: str
    weight: float = 1.0
    max_running: int | None = None
    max_queued: int | None = None
    tokens_per_minute: int | None = None


@dataclass(frozen=True, slots=True)
class Key:
    """A key, by its SHA-256 digest.

    Args:
        tenant: whose it is; several keys may be one tenant's.
        highest_class: most urgent priority class that its holder may ask for; 0 is the most urgent of all.
    """

    digest: bytes
    tenant: str
    highest_class: int = 0
    scopes: frozenset[Scope] = frozenset({Scope.INFERENCE})


@dataclass(frozen=True, slots=True)
class KeysFile:
    """What a keys file says: at least one key, and every tenant that a key names."""

    keys: tuple[Key, ...]
    tenants: tuple[Tenant, ...]


def read_keys_file(path: str) -> KeysFile:
    """Read the keys file at `path`.

    Raises: SetupError that names the file, and the entry, the field and the accepted form if its content is at fault.
    """
    try:
        with Path(path).open("rb") as file:
            content = file.read(_MAX_FILE_BYTES + 1)
    except OSError as error:
        raise SetupError(f"keys file {path}: {error.strerror or error}") from None
    if len(content) > _MAX_FILE_BYTES:
        raise SetupError(f"keys file {path}: larger than {_MAX_FILE_BYTES >> 20} MiB")
    try:
        return parse_keys(content.decode(), path)
    except UnicodeDecodeError:
        raise SetupError(f"keys file {path}: not UTF-8 text") from None


def parse_keys(text: str, path: str) -> KeysFile:
    """Read the text of a keys file; `path` is for messages. Raises: as `read_keys_file`."""
    try:
        document = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise SetupError(f"keys file {path}: no TOML: {error}") from None
    for name in document:
        if name not in ("key", "tenant"):
            raise SetupError(f"keys file {path}: unknown entry {_shown(name)}; expected [[key]] and [tenant.NAME]")
    keys = _keys(document.get("key", []), path)
    tenants = _tenants(document.get("tenant", {}), path)
    used = {key.tenant for key in keys}
    for name in tenants:
        if name not in used:  # most likely misspelt here or there, and its limits would hold for nobody
            raise SetupError(f"keys file {path}: tenant {name}: no key names it; expected the tenant of a [[key]]")
    return KeysFile(keys, tuple(tenants.get(name, Tenant(name)) for name in sorted(used)))


def _keys(entries: Any, path: str) -> tuple[Key, ...]:
    if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
        raise SetupError(f"keys file {path}: key: expected tables that begin with [[key]]")
    if not 1 <= len(entries) <= MAX_KEYS:
        raise SetupError(f"keys file {path}: {len(entries)} keys; expected 1 to {MAX_KEYS} tables [[key]]")
    keys: list[Key] = []
    numbers: dict[bytes, int] = {}
    for number, entry in enumerate(entries, 1):
        table = _Table(path, f"key {number}", entry)
        keys.append(_key(table))
        first = numbers.setdefault(keys[-1].digest, number)
        if first != number:
            table.refuse("sha256", f"the same as that of key {first}", "a digest that no other key has")
    return tuple(keys)


def _key(table: _Table) -> Key:
    form = "64 hexadecimal digits, as from: printf %s KEY | sha256sum"
    key = Key(
        digest=table.required("sha256", _read_digest, form, is_secret=True),
        tenant=table.required("tenant", _read_tenant, _TENANT_FORM),
        highest_class=table.optional("highest_class", _read_class, f"a whole number from 0 to {_MAX_U32}", 0),
        scopes=table.optional(
            "scopes", _read_scopes, 'a list of "inference" and "control", not empty', frozenset({Scope.INFERENCE})
        ),
    )
    table.check_empty()
    return key


def _tenants(entries: Any, path: str) -> dict[str, Tenant]:
    if not isinstance(entries, dict):
        raise SetupError(f"keys file {path}: tenant: expected tables that begin with [tenant.NAME]")
    tenants: dict[str, Tenant] = {}
    for name, entry in entries.items():
        if _TENANT.fullmatch(name) is None:
            raise SetupError(f"keys file {path}: tenant {_shown(name)}: no name; expected {_TENANT_FORM}")
        if not isinstance(entry, dict):
            raise SetupError(f"keys file {path}: tenant {name}: expected a table that begins with [tenant.{name}]")
        table = _Table(path, f"tenant {name}", entry)
        tenants[name] = Tenant(
            name,
            weight=table.optional("weight", _read_weight, f"a number from {MIN_WEIGHT:g} to {MAX_WEIGHT:g}", 1.0),
            max_running=table.optional("max_running", _read_count, _COUNT_FORM, None),
            max_queued=table.optional("max_queued", _read_count, _COUNT_FORM, None),
            tokens_per_minute=table.optional("tokens_per_minute", _read_count, _COUNT_FORM, None),
        )
        table.check_empty()
    return tenants


class _Table:
    """A table whose fields are taken one after the other."""

    def __init__(self, path: str, entry: str, values: Mapping[str, Any]) -> None:
        self._path = path
        self._entry = entry
        self._values = dict(values)
        self._known: list[str] = []

    def required(self, field: str, read: Callable[[Any], T], form: str, *, is_secret: bool = False) -> T:
        """A field that must be there, as `read` gives it; what `read` refuses with ValueError is a SetupError."""
        if field not in self._values:
            raise SetupError(f"keys file {self._path}: {self._entry}: {field} is missing; expected {form}")
        self._known.append(field)
        value = self._values.pop(field)
        try:
            return read(value)
        except ValueError:
            shown = "the given value" if is_secret else _shown(value)
            self.refuse(field, f"{shown} is not accepted", form)

    def optional(self, field: str, read: Callable[[Any], T], form: str, default: T) -> T:
        """A field that may be left out; otherwise as `required`."""
        if field in self._values:
            return self.required(field, read, form)
        self._known.append(field)
        return default

    def check_empty(self) -> None:
        """Raise SetupError if fields are left that nobody took."""
        for field in self._values:
            known = ", ".join(self._known)
            raise SetupError(f"keys file {self._path}: {self._entry}: unknown field {_shown(field)}; expected {known}")

    def refuse(self, field: str, what: str, form: str) -> NoReturn:
        """Raise SetupError."""
        raise SetupError(f"keys file {self._path}: {self._entry}: {field}: {what}; expected {form}")


def _read_digest(value: Any) -> bytes:
    if not isinstance(value, str) or _DIGEST.fullmatch(value) is None:
        raise ValueError
    return bytes.fromhex(value)


def _read_tenant(value: Any) -> str:
    if not isinstance(value, str) or _TENANT.fullmatch(value) is None:
        raise ValueError
    return value


def _read_class(value: Any) -> int:
    if type(value) is not int or not 0 <= value <= _MAX_U32:  # true is no number
        raise ValueError
    return value


def _read_count(value: Any) -> int:
    if _read_class(value) == 0:
        raise ValueError
    return int(value)


def _read_weight(value: Any) -> float:
    if type(value) not in (int, float) or not MIN_WEIGHT <= value <= MAX_WEIGHT:
        raise ValueError
    return float(value)


def _read_scopes(value: Any) -> frozenset[Scope]:
    if not isinstance(value, list) or not value:
        raise ValueError
    return frozenset(Scope(name) for name in value)


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:80]}..."
