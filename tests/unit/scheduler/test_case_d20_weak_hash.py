"""Case D20 on the core: nobody reads foreign KV under a hash that is weak where it may be, and how weak it may not be.

Tables compare whole names after their short hash, so a short hash that never differs costs time alone. A name itself is
trusted without a look at the tokens; that is right because different prefixes are hashed from different bytes, so that
only a collision of SHA-256 could give them one name.
"""

from __future__ import annotations

import hashlib
import itertools
import random
from collections.abc import Callable
from types import SimpleNamespace

import pytest

from tests.shadow_engine import ShadowEngine, coin, generate_alone
from tokenloom.scheduler.core import block_hash
from tokenloom.scheduler.core.block_hash import chain_hashes, root_hash
from tokenloom.scheduler.core.request import Request
from tokenloom.scheduler.core.scheduler import SchedulerConfig

BLOCK_SIZE = 2
# Salts and adapters that spell the same bytes when they are only put one after the other, or beside lengths and ids.
TEXTS = ["", "a", "b", "ab", "ba", "a\0", "\0", "\0\0\0\0", "\1\0\0\0a", "tokenloom/1", "tokenloom/1a"]


class Digest:
    """What `hashlib.sha256` returns, with another function behind it."""

    def __init__(self, data: bytes, digest: Callable[[bytes], bytes]) -> None:
        self._data, self._digest = data, digest

    def update(self, data: bytes) -> None:
        self._data += data

    def digest(self) -> bytes:
        return self._digest(self._data)


def use_hash(monkeypatch: pytest.MonkeyPatch, digest: Callable[[bytes], bytes]) -> None:
    """Let the core hash with another function."""
    stand_in = SimpleNamespace(sha256=lambda data=b"": Digest(bytes(data), digest))
    monkeypatch.setattr(block_hash, "hashlib", stand_in)


class EqualInTables(bytes):
    """A name whose short hash, as tables use it, is that of every other name."""

    def __hash__(self) -> int:
        return 1


def strong_in_a_weak_table(data: bytes) -> bytes:
    return EqualInTables(hashlib.sha256(data).digest())


def one_byte(data: bytes) -> bytes:
    return hashlib.sha256(data).digest()[:1]


def constant(_data: bytes) -> bytes:
    return b"same"


def serve_many() -> int:
    """Prompts of two tokens under several salts, all cached; returns the prompt tokens found in the cache.

    Raises: AssertionError if one reads foreign KV or gets other tokens than alone.
    """
    shadow = ShadowEngine(SchedulerConfig(block_size=BLOCK_SIZE), num_blocks=512, next_token=coin)
    choose = random.Random(7)
    num_found = 0
    for number in range(120):
        prompt = [choose.randrange(2) for _ in range(choose.randrange(1, 12))]
        request = Request(str(number), list(prompt), 2, cache_salt=choose.choice(TEXTS))
        shadow.add(request)
        shadow.run_until_idle()
        assert shadow.told[str(number)] == generate_alone(prompt, 2, next_token=coin)
        num_found += request.num_cached_tokens or 0
    return num_found


def test_a_short_hash_that_is_the_same_for_all_names_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    num_found = serve_many()
    assert num_found > 0
    use_hash(monkeypatch, strong_in_a_weak_table)
    assert serve_many() == num_found


@pytest.mark.parametrize("digest", [constant, one_byte])
def test_names_that_collide_would_be_noticed_by_this_test(
    digest: Callable[[bytes], bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    use_hash(monkeypatch, digest)
    with pytest.raises(AssertionError, match="reads foreign KV"):
        serve_many()


def test_equal_names_mean_equal_prefixes_under_a_hash_without_collisions(monkeypatch: pytest.MonkeyPatch) -> None:
    """Such a hash gives each input a number of its own, so names are equal if and only if the bytes hashed are."""
    seen: dict[bytes, bytes] = {}
    use_hash(monkeypatch, lambda data: seen.setdefault(data, len(seen).to_bytes(32, "little")))
    prefix_of: dict[bytes, tuple[str, str, tuple[int, ...]]] = {}
    for salt, adapter in itertools.product(TEXTS, TEXTS):
        for token_ids in itertools.product((0, 1), repeat=3 * BLOCK_SIZE):
            names = chain_hashes(root_hash(salt, adapter), token_ids, BLOCK_SIZE)
            for number, name in enumerate(names, start=1):
                prefix = (salt, adapter, token_ids[: number * BLOCK_SIZE])
                assert prefix_of.setdefault(name, prefix) == prefix
    num_prefixes = len(TEXTS) ** 2 * sum(2 ** (number * BLOCK_SIZE) for number in (1, 2, 3))
    assert len(prefix_of) == num_prefixes, "the same prefix has the same name"
