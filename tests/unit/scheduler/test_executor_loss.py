"""The executor is lost: what its requests have is kept, and what no longer fits ends."""

from tests.shadow_engine import ShadowEngine
from tokenloom.scheduler.core.request import FinishReason, Request, RequestRefused
from tokenloom.scheduler.core.scheduler import SchedulerConfig


def busy_engine() -> tuple[ShadowEngine, Request, Request]:
    engine = ShadowEngine(SchedulerConfig(block_size=2, max_num_seqs=1), num_blocks=16, depth=2)
    runs, waits = Request("runs", [1, 2, 3], 6), Request("waits", [101, 102, 103], 6)
    engine.add(runs)
    engine.add(waits)
    engine.step()
    engine.plan()
    return engine, runs, waits


def test_no_token_is_repeated_or_lost() -> None:
    engine, _, _ = busy_engine()
    assert engine.lose_executor(16) == []
    engine.run_until_idle()
    assert engine.told == {"runs": [4, 5, 6, 7, 8, 9], "waits": [104, 105, 106, 107, 108, 109]}


def test_no_block_of_the_lost_executor_is_found() -> None:
    engine, runs, _ = busy_engine()
    engine.lose_executor(16)
    plan = engine.plan()
    assert plan is not None
    assert plan.rows[0].request is runs
    assert plan.rows[0].is_new
    assert plan.rows[0].num_computed_tokens == 0


def test_new_executor_is_not_told_to_forget_rows_of_the_lost_one() -> None:
    engine, _, waits = busy_engine()
    engine.finish("runs", FinishReason.ABORTED)
    engine.lose_executor(16)
    plan = engine.plan()
    assert plan is not None
    assert plan.rows[0].request is waits
    assert plan.finished_row_ids == []


def test_requests_run_in_their_old_order() -> None:
    engine, runs, waits = busy_engine()
    engine.lose_executor(16)
    assert list(engine.core.waiting) == [runs, waits]


def test_smaller_memory_lowers_limits_and_ends_what_does_not_fit() -> None:
    engine, runs, waits = busy_engine()
    engine.apply()
    (told,) = engine.lose_executor(3)
    assert told.request is runs, "3 prompt and 2 output tokens do not fit into 4"
    assert isinstance(told.error, RequestRefused)
    assert "has 5 tokens" in str(told.error)
    assert "room for 4" in str(told.error)
    assert waits.max_output_tokens == 1
    engine.run_until_idle()
    assert engine.finish_reasons == {"runs": FinishReason.ERROR, "waits": FinishReason.LENGTH}
