"""Nobody reads KV of another prompt or another salt, not even if table hashes collide (D20)."""

import pytest

from tests.shadow_engine import ShadowEngine, coin, generate_alone
from tokenloom.scheduler.core import kv_cache
from tokenloom.scheduler.core.block_hash import chain_hashes
from tokenloom.scheduler.core.request import Request
from tokenloom.scheduler.core.scheduler import SchedulerConfig


class CollidingName(bytes):
    """A digest whose short hash, as tables use it, is the same as every other's."""

    def __hash__(self) -> int:
        return 1


def engine() -> ShadowEngine:
    return ShadowEngine(SchedulerConfig(block_size=2), num_blocks=64, next_token=coin)


def num_cached(shadow: ShadowEngine, name: str, prompt: list[int], salt: str = "") -> int | None:
    request = Request(name, list(prompt), 3, cache_salt=salt)
    shadow.add(request)
    shadow.run_until_idle()
    assert shadow.told[name] == generate_alone(prompt, 3, next_token=coin)
    return request.num_cached_tokens


def test_blocks_are_not_found_by_a_short_hash_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def colliding_hashes(parent: bytes, token_ids: list[int], block_size: int) -> list[bytes]:
        return [CollidingName(name) for name in chain_hashes(parent, token_ids, block_size)]

    monkeypatch.setattr(kv_cache, "chain_hashes", colliding_hashes)
    shadow = engine()
    assert num_cached(shadow, "first", [1, 2, 3, 4, 5]) == 0
    assert num_cached(shadow, "other", [5, 6, 7, 8, 9]) == 0
    assert num_cached(shadow, "first again", [1, 2, 3, 4, 5]) == 4
    assert num_cached(shadow, "half", [1, 2, 7, 8, 9]) == 2


def test_shadow_executor_would_notice_equal_names_of_different_prefixes(monkeypatch: pytest.MonkeyPatch) -> None:
    def equal_names(_parent: bytes, token_ids: list[int], block_size: int) -> list[bytes]:
        return [bytes([i]) for i in range(len(token_ids) // block_size)]

    monkeypatch.setattr(kv_cache, "chain_hashes", equal_names)
    shadow = engine()
    num_cached(shadow, "first", [1, 2, 3, 4, 5])
    with pytest.raises(AssertionError, match="reads foreign KV"):
        num_cached(shadow, "other", [5, 6, 7, 8, 9])


def test_same_tokens_behind_another_beginning_are_not_shared() -> None:
    shadow = engine()
    num_cached(shadow, "first", [1, 2, 3, 4, 5])
    assert num_cached(shadow, "moved", [3, 4, 3, 4, 5]) == 0


def test_salts_share_nothing_with_each_other_and_none() -> None:
    shadow = engine()
    prompt = [1, 2, 3, 4, 5]
    assert num_cached(shadow, "none", prompt) == 0
    assert num_cached(shadow, "blue", prompt, "blue") == 0
    assert num_cached(shadow, "green", prompt, "green") == 0
    assert num_cached(shadow, "blue again", prompt, "blue") == 4
    assert num_cached(shadow, "none again", prompt) == 4


def test_request_does_not_wait_for_the_same_prefix_under_another_salt() -> None:
    shadow = engine()
    for salt in ("blue", "green"):
        shadow.add(Request(salt, [1, 2, 3, 4, 5], 3, cache_salt=salt))
    plan = shadow.plan()
    assert plan is not None
    assert [row.request.request_id for row in plan.rows] == ["blue", "green"]
