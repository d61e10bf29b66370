"""The eight rules for plans in flight, by their numbers in scheduler.py."""

import pytest

from tests.shadow_engine import WANTS_PROMPT_LOGPROBS, ShadowEngine, coin, count_on, generate_alone
from tokenloom.scheduler.core.plan import SchedulerOutput
from tokenloom.scheduler.core.request import FinishReason, Request
from tokenloom.scheduler.core.scheduler import SchedulerConfig


def planned(engine: ShadowEngine) -> SchedulerOutput:
    plan = engine.plan()
    assert plan is not None
    return plan


def names(plan: SchedulerOutput) -> list[str]:
    return [row.request.request_id for row in plan.rows]


def engine_with_two_full_tables(depth: int) -> tuple[ShadowEngine, Request, Request]:
    """Two requests hold all four blocks, in full; each needs another block in the plan after next."""
    engine = ShadowEngine(SchedulerConfig(block_size=2), num_blocks=5, depth=depth)
    early, late = Request("early", [1, 2, 3], 5), Request("late", [101, 102, 103], 5)
    engine.add(early)
    engine.add(late)
    return engine, early, late


def test_rule_1_blocks_freed_while_a_plan_is_made_are_given_out_in_that_plan() -> None:
    engine, early, late = engine_with_two_full_tables(depth=3)
    planned(engine)
    planned(engine)
    lost = list(late.block_ids)
    plan = planned(engine)
    assert [preemption.request for preemption in plan.preempted] == [late]
    assert plan.rows[0].request is early
    assert set(plan.rows[0].new_block_ids) <= set(lost)
    engine.run_until_idle()  # the shadow executor objects if a row reads what another wrote
    assert engine.told["late"] == [104, 105, 106, 107, 108]


def test_rule_2_preempted_request_waits_for_its_last_result_and_keeps_that_token() -> None:
    engine, early, late = engine_with_two_full_tables(depth=3)
    planned(engine)
    planned(engine)
    assert [preemption.request for preemption in planned(engine).preempted] == [late]
    engine.finish("early", FinishReason.ABORTED)  # now there is room for `late`
    engine.apply()
    assert late.num_plans_in_flight == 1
    assert engine.plan() is None
    engine.apply()
    assert late.output_token_ids == [104, 105]
    plan = planned(engine)
    assert names(plan) == ["late"]
    assert plan.rows[0].is_new
    assert late.num_computed_tokens == late.num_tokens
    assert early.is_finished


def test_rule_2_nobody_overtakes_a_preempted_request_while_its_result_is_on_its_way() -> None:
    engine, early, late = engine_with_two_full_tables(depth=3)
    engine.add(Request("last", [7], 1))
    planned(engine)
    planned(engine)
    assert [preemption.request for preemption in planned(engine).preempted] == [late]
    engine.finish("early", FinishReason.ABORTED)
    engine.apply()
    assert engine.plan() is None
    assert early.is_finished


def test_nobody_is_admitted_in_a_plan_that_preempts() -> None:
    engine, _, late = engine_with_two_full_tables(depth=1)
    engine.step()
    engine.step()
    engine.add(Request("small", [7], 1))
    plan = planned(engine)
    assert [preemption.request for preemption in plan.preempted] == [late]
    assert names(plan) == ["early"]


def test_rule_3_block_is_named_when_its_result_was_applied() -> None:
    engine = ShadowEngine(SchedulerConfig(block_size=2), num_blocks=16, depth=2)
    engine.add(Request("first", [1, 2, 3, 4], 4))
    planned(engine)
    engine.finish("first", FinishReason.ABORTED)
    engine.execute()
    engine.add(Request("second", [1, 2, 3, 4], 4))
    assert planned(engine).rows[0].num_computed_tokens == 0


def test_rule_3_block_of_a_row_that_failed_is_not_named() -> None:
    engine = ShadowEngine(SchedulerConfig(block_size=2), num_blocks=16)
    engine.add(Request("bad", [1, 2, 3, 4], 4))
    engine.executor.failing_request_ids.add("bad")
    engine.step()
    assert engine.finish_reasons["bad"] is FinishReason.ERROR
    assert engine.core.kv.pool.num_cached_blocks == 0


def test_rule_3_failed_step_names_nothing_and_its_rows_start_again() -> None:
    engine = ShadowEngine(SchedulerConfig(block_size=2), num_blocks=16, depth=2)
    for name, first in (("a", 1), ("b", 51)):
        engine.add(Request(name, [first, first + 1, first + 2], 4))
    planned(engine)
    engine.executor.fails_next_step = True
    engine.apply()
    assert engine.core.kv.pool.num_free_blocks == 15
    assert engine.core.kv.pool.num_cached_blocks == 0
    engine.run_until_idle()
    assert engine.told == {"a": [4, 5, 6, 7], "b": [54, 55, 56, 57]}


def test_rule_3_newest_sampled_token_never_counts() -> None:
    engine = ShadowEngine(SchedulerConfig(block_size=4), num_blocks=16)
    request = Request("a", [1, 2, 3], 4)
    engine.add(request)
    engine.step()
    assert request.num_tokens == 4
    assert request.num_hashed_blocks == 0
    engine.step()
    assert request.num_hashed_blocks == 1


def test_rule_4_cold_requests_with_one_prefix_compute_it_once() -> None:
    config = SchedulerConfig(block_size=16, max_num_batched_tokens=512)
    engine = ShadowEngine(config, num_blocks=200, depth=2, next_token=lambda token_ids: token_ids[-1])
    prefix = list(range(384))
    for i in range(32):
        engine.add(Request(str(i), [*prefix, 1000 + i], 1))
    engine.run_until_idle()
    assert engine.executor.num_tokens_computed == 384 + 32


def test_rule_4_requests_go_on_if_the_one_that_computes_their_prefix_ends() -> None:
    engine = ShadowEngine(SchedulerConfig(block_size=2), num_blocks=16, depth=2)
    for name in "abc":
        engine.add(Request(name, [1, 2, 3, 4, 5], 2))
    assert names(planned(engine)) == ["a"]
    engine.finish("a", FinishReason.ABORTED)
    assert names(planned(engine)) == ["b"]
    engine.run_until_idle()
    assert engine.told["b"] == engine.told["c"] == [6, 7]


def test_rule_4_a_waiting_request_does_not_hold_up_those_behind_it() -> None:
    engine = ShadowEngine(SchedulerConfig(block_size=2), num_blocks=16)
    for name, first in (("a", 1), ("same", 1), ("other", 51)):
        engine.add(Request(name, [first, first + 1, first + 2], 2))
    assert names(planned(engine)) == ["a", "other"]


@pytest.mark.parametrize("depth", [1, 2, 3, 4])
def test_rule_5_a_stop_by_counting_wastes_no_row(depth: int) -> None:
    engine = ShadowEngine(SchedulerConfig(), num_blocks=16, depth=depth)
    engine.add(Request("a", [1, 2, 3], 6))
    engine.run_until_idle()
    assert engine.told["a"] == [4, 5, 6, 7, 8, 9]
    assert engine.num_steps == 6
    assert engine.core.stats.num_wasted_rows == 0


@pytest.mark.parametrize("depth", [1, 2, 3, 4])
def test_rule_5_a_stop_token_wastes_a_row_per_further_plan_in_flight(depth: int) -> None:
    engine = ShadowEngine(SchedulerConfig(), num_blocks=16, depth=depth)
    engine.add(Request("a", [1, 2, 3], 50, stop_token_ids=frozenset({7})))
    engine.run_until_idle()
    assert engine.told["a"] == [4, 5, 6, 7]
    assert engine.core.stats.num_wasted_rows == depth - 1


def test_rule_6_a_row_fed_by_a_plan_in_flight_computes_just_that_token() -> None:
    engine = ShadowEngine(SchedulerConfig(block_size=2), num_blocks=16, depth=3)
    engine.add(Request("a", [1, 2, 3], 8))
    plans = [planned(engine) for _ in range(3)]
    assert [plan.rows[0].feeds_back for plan in plans] == [False, True, True]
    assert [plan.rows[0].num_scheduled_tokens for plan in plans] == [3, 1, 1]


def test_rule_7_prompt_logprobs_read_no_prefix_cache() -> None:
    engine = ShadowEngine(SchedulerConfig(block_size=2), num_blocks=16)
    engine.add(Request("first", [1, 2, 3, 4, 5], 1))
    engine.run_until_idle()
    request = Request("asks", [1, 2, 3, 4, 5], 1, reads_prefix_cache=False, payload=WANTS_PROMPT_LOGPROBS)
    engine.add(request)
    engine.run_until_idle()
    assert request.num_cached_tokens == 0
    assert engine.told_prompt_positions["asks"] == [1, 2, 3, 4]


def test_rule_7_prompt_logprobs_are_not_told_again_after_a_preemption() -> None:
    config = SchedulerConfig(block_size=2, max_num_batched_tokens=6)
    engine = ShadowEngine(config, num_blocks=7, depth=2)
    engine.add(Request("early", [51, 52, 53], 8))
    asks = Request("asks", [1, 2, 3, 4, 5, 6, 7], 2, reads_prefix_cache=False, payload=WANTS_PROMPT_LOGPROBS)
    engine.add(asks)
    engine.run_until_idle()
    assert asks.num_preemptions > 0
    assert engine.told_prompt_positions["asks"] == [1, 2, 3, 4, 5, 6]
    assert engine.told["asks"] == [8, 9]


def test_rule_8_choices_share_full_blocks_and_compute_the_partial_one_again() -> None:
    engine = ShadowEngine(SchedulerConfig(block_size=4), num_blocks=16, next_token=coin)
    choices = [Request(f"choice-{i}", [1, 2, 3, 4, 5, 6], 6) for i in range(3)]
    for choice in choices:
        engine.add(choice)
    engine.step()
    assert [choice.block_ids for choice in choices] == [[1, 2], [], []]
    engine.step()
    assert [choice.block_ids[0] for choice in choices] == [1, 1, 1]
    assert len({choice.block_ids[1] for choice in choices}) == 3
    engine.run_until_idle()
    alone = generate_alone([1, 2, 3, 4, 5, 6], 6, next_token=coin)
    assert all(told == alone for told in engine.told.values())


def test_row_without_a_sampled_token_ends_with_an_error() -> None:
    engine = ShadowEngine(SchedulerConfig(), num_blocks=16, next_token=count_on)
    engine.add(Request("a", [1], 4))
    planned(engine)
    result = engine.executor.execute()
    result.sampled = {}
    (told,) = engine.core.update(result)
    assert told.finish_reason is FinishReason.ERROR
    assert "sampled no token" in told.error


def test_idle_executor_is_told_once_which_rows_ended() -> None:
    engine = ShadowEngine(SchedulerConfig(), num_blocks=16, depth=2)
    engine.add(Request("a", [1, 2, 3], 2))
    first = planned(engine)
    assert engine.release_rows() is None, "plans in flight: the next one tells"
    while engine.core.num_requests:
        engine.step()
    plan = engine.release_rows()
    assert plan is not None
    assert (plan.rows, plan.finished_row_ids) == ([], [first.rows[0].row_id])
    engine.apply()
    assert engine.executor.num_rows == 0
    assert engine.release_rows() is None


def test_rule_4_nobody_waits_for_a_prefix_that_a_lower_class_computes() -> None:
    config = SchedulerConfig(block_size=2, max_num_seqs=64, max_num_batched_tokens=4, ageing_s=0.0)
    engine = ShadowEngine(config, num_blocks=256)
    engine.add(Request("low", [1] * 20 + [2], 1, priority_class=3))
    engine.step()
    urgent = [Request(f"urgent-{i}", [1] * 20 + [10 + i], 1) for i in range(3)]
    for request in urgent:
        engine.add(request)
    engine.add(Request("endless", list(range(1000, 1200)), 1, priority_class=2))
    while any(request.request_id not in engine.finish_reasons for request in urgent):
        engine.step()
        assert engine.num_steps < 12
    assert [request.num_cached_tokens for request in urgent[1:]] == [20, 20], "they wait for the first of their class"


def test_rule_4_many_that_wait_for_a_prefix_do_not_hold_up_a_stranger_behind_them() -> None:
    engine = ShadowEngine(SchedulerConfig(block_size=2, max_num_seqs=4, max_num_batched_tokens=8), num_blocks=64)
    for i in range(20):
        engine.add(Request(f"choice-{i}", [1] * 40, 1))
    engine.step()
    engine.add(Request("stranger", [2, 3], 1))
    engine.step()
    assert engine.finish_reasons["stranger"] is FinishReason.LENGTH


def test_short_prompts_are_not_cut_for_those_behind_them() -> None:
    config = SchedulerConfig(block_size=4, max_num_seqs=16, max_num_batched_tokens=64)
    engine = ShadowEngine(config, num_blocks=256, next_token=coin)
    for i in range(8):
        engine.add(Request(str(i), [i % 2, *([i // 2 % 2] * 15)], 1, cache_salt=str(i)))
    assert [row.num_scheduled_tokens for row in planned(engine).rows] == [16] * 4


def test_the_new_rows_of_a_plan_bring_a_bounded_number_of_ids_and_one_alone_may_bring_more() -> None:
    """All fit into the token budget, so that without the bound one plan would bring them all."""
    engine = ShadowEngine(SchedulerConfig(block_size=2, max_new_row_ids=12), num_blocks=64, depth=1)
    sizes = {"a": 5, "b": 7, "c": 1, "long": 20, "d": 2}
    for start, (name, num_ids) in enumerate(sizes.items()):
        engine.add(Request(name, list(range(100 * start, 100 * start + num_ids)), 4))
    new_rows = []
    for _ in range(4):
        plan = planned(engine)
        new_rows.append([row.request.request_id for row in plan.rows if row.is_new])
        engine.apply()
    assert new_rows == [["a", "b"], ["c"], ["long"], ["d"]]
    engine.run_until_idle()
    assert all(len(engine.told[name]) == 4 for name in sizes)
