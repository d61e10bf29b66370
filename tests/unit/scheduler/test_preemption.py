"""Short memory: preempted requests lose and repeat nothing (D18), and nobody waits for ever (D19)."""

import statistics

import pytest

from tests.shadow_engine import ShadowEngine, coin, generate_alone
from tokenloom.scheduler.core.request import FinishReason, Request, RequestRefused
from tokenloom.scheduler.core.scheduler import SchedulerConfig


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_streams_that_cannot_all_run_get_what_they_get_alone(depth: int) -> None:
    engine = ShadowEngine(SchedulerConfig(block_size=4), num_blocks=24, depth=depth, next_token=coin)
    requests = [Request(f"stream-{i}", [i // 2] * 5, 50) for i in range(8)]  # pairs share their prompt, as with n=2
    requests += [Request("stops", [1, 1], 50, stop_token_ids=frozenset({0}), min_output_tokens=20)]
    for request in requests:
        engine.add(request)
    engine.run_until_idle()
    assert engine.core.stats.num_preemptions > 0
    assert engine.core.stats.num_preemptions == sum(request.num_preemptions for request in requests)
    for request in requests:
        assert engine.told[request.request_id] == generate_alone(
            request.prompt_token_ids,
            50,
            next_token=coin,
            stop_token_ids=request.stop_token_ids,
            min_output_tokens=request.min_output_tokens,
        )
    assert all(len(engine.told[f"stream-{i}"]) == 50 for i in range(8))


def test_preempted_request_reads_its_own_blocks_back_from_the_cache() -> None:
    engine = ShadowEngine(SchedulerConfig(block_size=2), num_blocks=7)
    engine.add(Request("early", [1, 2, 3], 6))
    late = Request("late", [101, 102, 103, 104, 105], 4)
    engine.add(late)
    for _ in range(3):
        engine.step()
    assert late.num_preemptions == 1
    while "early" not in engine.finish_reasons:
        engine.step()  # takes one of the three blocks that `late` had filled, the last one
    plan = engine.plan()
    assert plan is not None
    assert plan.rows[0].request is late
    assert plan.rows[0].num_computed_tokens == 4
    assert late.num_cached_tokens == 0, "what is told is what was cached when the request first ran"


def test_victim_is_the_youngest_of_the_lowest_class() -> None:
    engine = ShadowEngine(SchedulerConfig(block_size=2), num_blocks=9, next_token=coin)
    classes = {"lowest-old": 2, "lowest-young": 2, "middle": 1, "urgent": 0}
    for i, (name, priority_class) in enumerate(classes.items()):
        engine.add(Request(name, [i, i, i], 10, priority_class=priority_class))
    victims: list[str] = []
    while len(victims) < 2:
        plan = engine.plan()
        assert plan is not None
        victims += [preemption.request.request_id for preemption in plan.preempted]
        engine.apply()
    assert victims[:2] == ["lowest-young", "lowest-old"]


def test_preemption_stands_in_a_plan_even_if_none_came_out_when_it_was_made() -> None:
    engine = ShadowEngine(SchedulerConfig(block_size=1), num_blocks=5, depth=3)
    engine.add(Request("ends", [1, 2], 1))
    grows = Request("grows", [51], 3)
    engine.add(grows)
    assert engine.plan() is not None  # `ends` holds 2 blocks until its result is applied, `grows` 1
    assert engine.plan() is not None  # the last block goes to `grows`
    assert engine.plan() is None  # no block for `grows`, which is preempted, and no row for `ends`
    assert grows.num_preemptions == 1
    engine.apply()
    engine.apply()
    plan = engine.plan()
    assert plan is not None
    assert [preemption.request for preemption in plan.preempted] == [grows]
    engine.run_until_idle()
    assert engine.told["grows"] == [52, 53, 54]


def test_request_that_can_never_fit_holds_nobody_up() -> None:
    solo = ShadowEngine(SchedulerConfig(block_size=4), num_blocks=9)
    solo.add(Request("alone", [1, 2, 3], 4))
    solo.run_until_idle()
    engine = ShadowEngine(SchedulerConfig(block_size=4), num_blocks=9)
    with pytest.raises(RequestRefused, match="40 tokens"):
        engine.add(Request("huge", [1] * 40, 4))
    for i in range(10):
        engine.add(Request(str(i), [i, i], 4))
    engine.run_until_idle()
    assert engine.num_steps <= 3 * solo.num_steps


def test_output_that_cannot_fit_ends_by_length_in_bounded_time() -> None:
    engine = ShadowEngine(SchedulerConfig(block_size=4), num_blocks=4)
    engine.add(Request("a", [1] * 9, 1000))
    engine.run_until_idle(max_steps=3)
    assert engine.finish_reasons["a"] is FinishReason.LENGTH
    assert engine.told["a"] == [2, 3, 4]
    assert engine.core.stats.num_preemptions == 0


def test_short_requests_do_not_wait_for_a_long_prompt() -> None:
    config = SchedulerConfig(block_size=4, max_num_batched_tokens=16)
    engine = ShadowEngine(config, num_blocks=200, next_token=lambda _token_ids: 0)
    engine.add(Request("long", list(range(400)), 2))
    steps_to_first_token = []
    for i in range(40):
        name = f"short-{i}"
        engine.add(Request(name, [500 + i, 1, 2], 2))
        for num_steps in range(1, 100):
            engine.step()
            if engine.told[name]:
                steps_to_first_token.append(num_steps)
                break
    assert statistics.median(steps_to_first_token) <= 1 + 2
    engine.run_until_idle()
    assert engine.told["long"] == [0, 0]
