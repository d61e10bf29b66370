"""The engine's events in one process: tenants, refusals, ends, deadlines, what is told and how often."""

from __future__ import annotations

import asyncio
import logging

import pytest

from tests.fakes import continuation
from tests.unit.scheduler.engine_stack import EngineStack, fake_capabilities, run
from tokenloom.common.errors import Internal, ResourceExhausted, Unavailable
from tokenloom.common.metrics import REGISTRY
from tokenloom.scheduler import engine as engine_module
from tokenloom.scheduler import load
from tokenloom.scheduler.core.plan import ModelOutput
from tokenloom.scheduler.core.request import FinishReason
from tokenloom.scheduler.core.tenants import TenantPolicy


def test_policies_are_remembered_before_there_is_an_executor_and_survive_its_loss() -> None:
    async def test() -> None:
        stack = EngineStack(can=None)
        stack.engine.set_tenant("early", TenantPolicy(weight=2.0))
        stack.engine.on_executor_ready(fake_capabilities())
        stack.engine.set_tenant("late", TenantPolicy(max_num_running=1))
        stack.engine.on_executor_lost("test")
        stack.engine.on_executor_ready(fake_capabilities(max_num_blocks=32))
        assert stack.core.tenants["early"].policy == TenantPolicy(weight=2.0)
        assert stack.core.tenants["late"].policy == TenantPolicy(max_num_running=1)
        for handle in (1, 2, 3):
            stack.submit(handle, [handle], tenant="late")
        plan = await stack.step()
        assert plan is not None
        assert len(plan.rows) == 1

    run(test)


def test_definitions_of_tenants_are_bounded_and_known_ones_can_still_be_changed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(engine_module, "_MAX_TENANTS", 2)

    async def test() -> None:
        stack = EngineStack()
        for name in "ab":
            stack.engine.set_tenant(name, TenantPolicy())
        with pytest.raises(ResourceExhausted, match="2 tenants are defined already"):
            stack.engine.set_tenant("c", TenantPolicy())
        stack.engine.set_tenant("a", TenantPolicy(weight=3.0))
        assert stack.core.tenants["a"].policy.weight == 3.0

    run(test)


def test_a_displaced_request_is_refused_once_and_never_heard_of_again() -> None:
    async def test() -> None:
        stack = EngineStack(max_num_seqs=1, max_num_waiting=2)
        for handle in (1, 2, 3, 4):
            stack.submit(handle, [handle], tenant="flood", resumable=True)
            if handle == 1:
                await stack.step()
        stack.submit(5, [5], tenant="light")
        await stack.step_until_idle()
        frame = await stack.hear()
        assert REGISTRY.get_sample_value("tokenloom_num_finished_requests_kept") == 2, "those of the flood that ran"
        assert {handle: error.reason for handle, error in frame.rejected} == {4: "QUEUE_FULL", 3: "QUEUE_FULL"}
        errors = dict(frame.rejected)
        assert "most is 2" in errors[4].message, "this one found no place"
        assert isinstance(errors[3], ResourceExhausted), "this one had a place and gave it up"
        assert errors[3].retry_after_s is not None
        assert sorted(row.handle for row in frame.finished) == [1, 2, 5]
        assert not {3, 4} & (set(frame.tokens.handles) | {handle for handle, _ in frame.accepted})
        assert stack.core.stats.num_displaced == 1
        assert not stack.session.streams

    run(test)


def test_giving_way_is_counted_apart_from_failing() -> None:
    def count(reason: str) -> float:
        return REGISTRY.get_sample_value("tokenloom_request_success_total", {"finished_reason": reason}) or 0.0

    async def test() -> None:
        before = {reason: count(reason) for reason in ("displaced", "error")}
        stack = EngineStack(max_num_seqs=1, max_num_waiting=2)
        stack.submit(1, [1], tenant="flood")
        await asyncio.sleep(0)
        for handle in (2, 3):
            stack.submit(handle, [handle], tenant="flood")
        stack.submit(4, [4], tenant="light")
        assert count("displaced") - before["displaced"] == 1
        plan = stack.plans.popleft()
        out_of_memory = ResourceExhausted("the device is out of memory")
        stack.engine.on_result(ModelOutput(plan.step_id, row_errors={plan.rows[0].row_id: out_of_memory}))
        assert count("displaced") - before["displaced"] == 1
        assert count("error") - before["error"] == 1
        frame = await stack.hear()
        assert [row.error for row in frame.finished] == [out_of_memory], "it ran, so its end is no refusal"

    run(test)


def test_a_tenants_own_limit_of_tokens_says_when_to_come_back() -> None:
    async def test() -> None:
        stack = EngineStack()
        stack.engine.set_tenant("a", TenantPolicy(max_tokens_per_minute=60))
        stack.submit(1, [1] * 50, tenant="a")
        stack.submit(2, [2] * 50, tenant="a")
        frame = await stack.hear()
        ((handle, error),) = frame.rejected
        assert (handle, error.reason) == (2, "TOKEN_RATE")
        assert error.retry_after_s == pytest.approx(40, abs=1)

    run(test)


def test_a_request_that_expires_in_the_queue_is_told_so_once_and_never_runs() -> None:
    async def test() -> None:
        stack = EngineStack(max_num_seqs=1)
        stack.submit(1, [5], 30)
        await stack.step()
        stack.submit(2, [6], remaining_time_ms=20)
        for _ in range(3):
            await stack.step()
        await asyncio.sleep(0.05)
        await stack.step_until_idle()
        await stack.hear()
        assert [row.reason for row in stack.finished[2]] == [FinishReason.DEADLINE]
        assert 2 not in stack.frames[0].tokens.handles
        assert [row.reason for row in stack.finished[1]] == [FinishReason.LENGTH]

    run(test)


def test_a_request_that_expires_while_decoding_frees_its_blocks_though_no_result_comes() -> None:
    """The timer ends it; the plan in flight may still write to its blocks, which rule 1 allows."""

    async def test() -> None:
        stack = EngineStack()
        stack.submit(1, [5] * 10, 100, remaining_time_ms=60)
        await stack.step()
        await stack.step()
        assert stack.core.kv.pool.num_held_blocks > 0
        await asyncio.sleep(0.1)
        assert stack.core.kv.pool.num_held_blocks == 0
        await stack.step_until_idle()
        await stack.hear()
        assert [row.reason for row in stack.finished[1]] == [FinishReason.DEADLINE]
        assert stack.finished[1][0].num_generated_tokens == 2
        assert stack.frames[0].tokens.handles == [1, 1], "wasted tokens are not told"

    run(test)


def test_the_timer_follows_the_earliest_deadline() -> None:
    async def test() -> None:
        stack = EngineStack(max_num_seqs=1)
        stack.submit(1, [5], 100, remaining_time_ms=60_000)
        await stack.step()
        stack.submit(2, [6], remaining_time_ms=50_000)
        stack.submit(3, [7], remaining_time_ms=30)
        await asyncio.sleep(0.08)
        await stack.hear()
        assert list(stack.finished) == [3]
        stack.submit(4, [8], remaining_time_ms=30)
        await asyncio.sleep(0.08)
        await stack.hear()
        assert set(stack.finished) == {3, 4}, "a timer that was armed for a later deadline does not hide an earlier one"

    run(test)


def test_a_resubmission_keeps_its_age_and_gets_no_more_than_its_remaining_time() -> None:
    async def test() -> None:
        stack = EngineStack(max_num_seqs=1)
        stack.submit(1, [5], 30)
        await stack.step()
        old = stack.submit(2, [6], remaining_time_ms=40, age_ms=60_000)
        new = stack.submit(3, [7])
        assert old.deadline_s is not None
        assert old.deadline_s - old.submitted_s == pytest.approx(60.04)
        assert new.submitted_s - old.submitted_s == pytest.approx(60, abs=1)
        again = stack.submit(9, [6], request_id="request-2", remaining_time_ms=60_000, age_ms=60_010)
        assert stack.engine.registry.streams["request-2"].request is old, "a takeover, not a new request"
        assert again is not old
        await asyncio.sleep(0.08)
        await stack.hear()
        assert [row.reason for row in stack.finished[9]] == [FinishReason.DEADLINE], "in the time that it had"

    run(test)


def test_the_last_load_after_a_storm_of_aborts_shows_an_idle_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load, "REPORT_PERIOD_S", 0.02)

    async def test() -> None:
        stack = EngineStack(max_num_seqs=4)
        requests = [stack.submit(handle, [handle] * 6, 50, group_id="storm") for handle in range(1, 21)]
        await stack.step()
        await stack.step()
        await asyncio.sleep(0.05)
        busy = (await stack.hear()).load
        assert busy is not None
        assert (busy.num_running, busy.num_waiting, busy.num_waiting_tokens) == (4, 16, 96)
        assert busy.tokens_per_second > 0
        assert busy.max_num_seqs == 4
        assert stack.engine.abort("storm") is True
        await asyncio.sleep(0.1)  # no result comes any more
        idle = (await stack.hear()).load
        assert idle is not None
        assert (idle.num_running, idle.num_waiting, idle.num_waiting_tokens) == (0, 0, 0)
        assert idle.num_free_blocks == idle.num_blocks == 63
        assert len(stack.finished) == len(requests)

    run(test)


def test_a_new_session_is_told_the_load_at_once() -> None:
    async def test() -> None:
        stack = EngineStack()
        stack.submit(1, [5])
        frame = await stack.open_session().outbox.take()
        assert frame is not None
        assert frame.load is not None
        assert frame.load.num_waiting == 1

    run(test)


def test_news_go_to_the_session_that_reads_a_request_now() -> None:
    async def test() -> None:
        stack = EngineStack()
        stack.submit(1, [5], 6)
        await stack.step()
        await stack.step()
        await stack.hear()
        other = stack.open_session()
        stack.engine.attach(other, 7, "request-1", 1)
        await stack.step_until_idle()
        frame = await other.outbox.take()
        assert frame is not None
        assert frame.tokens.first_token_indexes == [1, 2, 3, 4, 5]
        assert frame.tokens.token_ids == continuation([5], 6)[1:]
        superseded = await stack.hear()
        assert [row.handle for row in superseded.finished] == [1]
        assert superseded.finished[0].error is not None
        assert superseded.finished[0].error.reason == "SUPERSEDED"

    run(test)


def test_an_executor_that_drains_gets_nothing_new_and_is_left_when_nothing_runs_there(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def test() -> None:
        stack = EngineStack()
        stack.submit(1, [5], 4)
        await stack.step()
        stack.engine.on_executor_draining()
        assert not stack.engine.is_ready
        load = stack.engine.load()
        assert load is not None
        assert load.waits_for_executor
        stack.submit(2, [6], 4)
        while not stack.has_left:
            plan = await stack.step()
            assert plan is not None
            assert [row.request.request_id for row in plan.rows] == ["request-1"]
        assert not stack.plans, "and nothing is in flight"
        stack.engine.on_executor_lost("the executor ended the stream", is_crash=False)
        stack.engine.on_executor_ready(fake_capabilities())
        assert stack.engine.is_ready
        await stack.step_until_idle()
        await stack.hear()
        tokens = stack.frames[0].tokens
        assert tokens.token_ids == continuation([5], 4) + continuation([6], 4)

    with caplog.at_level(logging.WARNING):
        run(test)
    assert not [record for record in caplog.records if record.name.startswith("tokenloom")]


def test_an_idle_executor_that_drains_is_left_at_once() -> None:
    async def test() -> None:
        stack = EngineStack()
        stack.engine.on_executor_draining()
        assert await stack.step() is None
        assert stack.has_left

    run(test)


def test_of_errors_only_those_are_kept_for_who_comes_back_that_are_the_requests_own() -> None:
    async def test() -> None:
        for error, num_kept in ((Internal("its logits are no numbers"), 1), (Unavailable("no executor"), 0)):
            stack = EngineStack()
            stack.submit(1, [5], resumable=True)
            await stack.step()
            plan = stack.plans.popleft()
            stack.engine.on_result(ModelOutput(plan.step_id, {}, row_errors={plan.rows[0].row_id: error}))
            assert REGISTRY.get_sample_value("tokenloom_num_finished_requests_kept") == num_kept

    run(test)
