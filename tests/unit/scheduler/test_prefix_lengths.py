"""Prompts of every length around block boundaries, cold and cached, in chunks around the block size (D17)."""

import pytest

from tests.shadow_engine import ShadowEngine, coin, generate_alone
from tokenloom.scheduler.core.request import Request
from tokenloom.scheduler.core.scheduler import SchedulerConfig

BLOCK_SIZE = 4


@pytest.mark.parametrize("chunk", [BLOCK_SIZE - 1, BLOCK_SIZE, BLOCK_SIZE + 1])
@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("num_tokens", range(1, 4 * BLOCK_SIZE + 2))
def test_cached_prompt_of_any_length_generates_the_same(num_tokens: int, depth: int, chunk: int) -> None:
    config = SchedulerConfig(block_size=BLOCK_SIZE, max_num_batched_tokens=chunk)
    engine = ShadowEngine(config, num_blocks=32, depth=depth, next_token=coin)
    prompt = [i * i % 7 for i in range(num_tokens)]
    for name in ("cold", "cached", "again"):
        num_computed = engine.executor.num_tokens_computed
        request = Request(name, list(prompt), 4)
        engine.add(request)
        engine.run_until_idle()
        assert engine.told[name] == generate_alone(prompt, 4, next_token=coin)
        num_full = (num_tokens - 1) // BLOCK_SIZE * BLOCK_SIZE
        assert request.num_cached_tokens == (0 if name == "cold" else num_full)
        assert engine.executor.num_tokens_computed - num_computed == num_tokens + 3 - request.num_cached_tokens


def test_suffix_behind_a_cached_prefix_may_be_shorter_than_a_chunk() -> None:
    config = SchedulerConfig(block_size=BLOCK_SIZE, max_num_batched_tokens=2 * BLOCK_SIZE)
    engine = ShadowEngine(config, num_blocks=32, next_token=coin)
    engine.add(Request("first", [1] * 12, 1))
    engine.run_until_idle()
    for num_more in range(1, 2 * BLOCK_SIZE + 2):
        prompt = [1] * 12 + [0] + [1] * num_more
        request = Request(f"more-{num_more}", prompt, 3)
        engine.add(request)
        engine.run_until_idle()
        assert request.num_cached_tokens is not None
        assert request.num_cached_tokens >= 12
        assert engine.told[request.request_id] == generate_alone(prompt, 3, next_token=coin)
