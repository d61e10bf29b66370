"""Every plan that the scheduler's core makes is one that the executor's rows take."""

from __future__ import annotations

import random
from collections import deque

import pytest
import torch

from tokenloom.executor.plan import NewRow, Plan, PlannedRow, SamplingParams
from tokenloom.executor.row_checks import Limits
from tokenloom.executor.rows import RowTable
from tokenloom.scheduler.core.plan import ModelOutput, RowOutput, SchedulerOutput
from tokenloom.scheduler.core.request import FinishReason, Request
from tokenloom.scheduler.core.scheduler import Scheduler, SchedulerConfig

BLOCK, NUM_BLOCKS, NUM_SEQS, BUDGET, CONTEXT = 4, 20, 4, 12, 60
STOP_TOKEN = 1
CONFIG = SchedulerConfig(max_num_seqs=NUM_SEQS, max_num_batched_tokens=BUDGET, max_model_len=CONTEXT, block_size=BLOCK)


def plan_of(output: SchedulerOutput) -> Plan:
    rows = [
        PlannedRow(r.row_id, r.num_scheduled_tokens, r.num_computed_tokens, r.new_block_ids, r.feeds_back)
        for r in output.rows
    ]
    new = [
        NewRow(r.row_id, r.request.prompt_token_ids, tuple(r.request.output_token_ids), SamplingParams(temperature=0.0))
        for r in output.rows
        if r.is_new
    ]
    return Plan(output.step_id, rows, new, output.finished_row_ids)


def run(table: RowTable, plan: Plan, choice: random.Random) -> ModelOutput:
    """Run a plan on rows without a model: tokens are random, stop tokens among them."""
    sampled = {}
    for scheduled in table.apply(plan):
        assert scheduled.row.failure is None
        if scheduled.is_sampling:
            token_id = choice.randrange(1, 12)
            scheduled.row.append(token_id)
            sampled[scheduled.row.row_id] = RowOutput([token_id])
    return ModelOutput(plan.step_id, sampled)


@pytest.mark.parametrize("seed", range(20))
def test_plans_in_flight_with_prefix_hits_preemptions_and_aborts_are_all_well_formed(seed: int) -> None:
    choice = random.Random(seed)
    scheduler = Scheduler(CONFIG, NUM_BLOCKS)
    table = RowTable(Limits(50, CONTEXT, BLOCK, NUM_SEQS, BUDGET), torch.device("cpu"))
    table.begin_epoch(NUM_BLOCKS)
    in_flight: deque[Plan] = deque()
    shared = [choice.randrange(2, 50) for _ in range(20)]
    for i in range(25):
        prompt = shared[: choice.randrange(0, 20)] + [choice.randrange(2, 50) for _ in range(choice.randrange(1, 20))]
        scheduler.add_request(Request(str(i), prompt, choice.randrange(1, 30), frozenset({STOP_TOKEN})))
    for _ in range(5000):
        if choice.random() < 0.02:
            scheduler.finish(str(choice.randrange(25)), FinishReason.ABORTED)
        output = scheduler.schedule() or scheduler.release_rows() if len(in_flight) < 3 else None
        if output is not None:
            in_flight.append(plan_of(output))
        elif in_flight:
            scheduler.update(run(table, in_flight.popleft(), choice))
        else:
            break
    assert scheduler.num_requests == 0
    assert len(table) == 0, "an idle executor keeps no row"
    assert scheduler.stats.num_prefix_hit_tokens > 0
    assert scheduler.stats.num_preemptions > 0
