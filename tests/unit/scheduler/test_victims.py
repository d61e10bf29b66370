"""Who gives way to whom, and who does not."""

from tests.shadow_engine import ShadowEngine
from tokenloom.scheduler.core.plan import PreemptReason, SchedulerOutput
from tokenloom.scheduler.core.preemption import MAX_GAVE_WAY
from tokenloom.scheduler.core.request import Request
from tokenloom.scheduler.core.scheduler import SchedulerConfig, SchedulingPolicy
from tokenloom.scheduler.core.tenants import TenantPolicy


def engine_with(policy: SchedulingPolicy = SchedulingPolicy.FAIR, num_blocks: int = 64, rows: int = 4) -> ShadowEngine:
    config = SchedulerConfig(max_num_seqs=rows, max_num_batched_tokens=64, block_size=2, policy=policy, ageing_s=0.0)
    return ShadowEngine(config, num_blocks)


def add(engine: ShadowEngine, name: str, *, tenant: str = "", priority_class: int = 0, num_output: int = 20) -> Request:
    number = 100 * len(engine.told)
    request = Request(name, [number + i for i in range(3)], num_output, tenant=tenant, priority_class=priority_class)
    engine.add(request)
    return request


def preempted(plan: SchedulerOutput | None) -> list[tuple[str, PreemptReason]]:
    assert plan is not None
    return [(preemption.request.request_id, preemption.reason) for preemption in plan.preempted]


def test_newest_request_of_the_lowest_class_gives_way_to_a_more_urgent_one() -> None:
    engine = engine_with()
    for name, priority_class in (("a", 1), ("b", 2), ("c", 2), ("d", 1)):
        add(engine, name, priority_class=priority_class)
    engine.step()
    add(engine, "urgent")
    assert preempted(engine.plan()) == [("c", PreemptReason.PRIORITY)]


def test_nobody_gives_way_to_his_equal_or_less_urgent() -> None:
    engine = engine_with()
    for name in "abcd":
        add(engine, name, priority_class=1)
    engine.step()
    add(engine, "equal", priority_class=1)
    add(engine, "lower", priority_class=2)
    assert preempted(engine.plan()) == []


def test_newest_request_of_the_tenant_furthest_over_its_share_gives_way() -> None:
    engine = engine_with(rows=6)
    engine.core.set_tenant("heavy", TenantPolicy(weight=3.0))
    for i in range(3):
        add(engine, f"heavy-{i}", tenant="heavy")
        add(engine, f"big-{i}", tenant="big")
    engine.step()
    add(engine, "light", tenant="light")
    assert preempted(engine.plan()) == [("big-2", PreemptReason.SHARE)]


def test_share_gives_no_way_past_a_more_urgent_class() -> None:
    engine = engine_with()
    for i in range(4):
        add(engine, f"urgent-{i}", tenant="flood")
    engine.step()
    add(engine, "light", tenant="light", priority_class=1)
    assert preempted(engine.plan()) == []


def test_plain_queue_preempts_for_nobody() -> None:
    engine = engine_with(SchedulingPolicy.FCFS)
    for i in range(4):
        add(engine, f"flood-{i}", tenant="flood", priority_class=3)
    engine.step()
    add(engine, "light", tenant="light")
    assert preempted(engine.plan()) == []


def test_tenant_far_ahead_of_the_others_has_no_claim_on_its_share() -> None:
    engine = engine_with()
    for i in range(4):
        add(engine, f"flood-{i}", tenant="flood")
    engine.step()
    engine.core.tenants["flood"].counter = 0.0
    add(engine, "light", tenant="light")
    engine.core.tenants["light"].counter = 1000.0
    assert preempted(engine.plan()) == []


def test_nobody_is_sent_away_if_that_makes_no_room() -> None:
    engine = engine_with(num_blocks=12)
    add(engine, "urgent-1")
    add(engine, "low", priority_class=1)
    engine.step()
    engine.add(Request("long", list(range(1000, 1018)), 1))  # needs 9 blocks; 11 less the 2 of urgent-1 would do
    engine.add(Request("longer", list(range(2000, 2020)), 1))
    plan = engine.plan()
    assert preempted(plan) == [("low", PreemptReason.PRIORITY)]
    engine = engine_with(num_blocks=12)
    add(engine, "urgent-1")
    add(engine, "low", priority_class=1)
    engine.step()
    engine.add(Request("longer", list(range(2000, 2020)), 1))  # needs 10
    assert preempted(engine.plan()) == []


def test_victim_that_is_planned_already_leaves_the_plan() -> None:
    engine = engine_with()
    for i in range(4):
        add(engine, f"low-{i}", priority_class=1)
    engine.step()
    victim = engine.core.running[-1]
    add(engine, "urgent")
    plan = engine.plan()
    assert plan is not None
    assert victim not in [row.request for row in plan.rows]
    assert plan.num_scheduled_tokens == sum(row.num_scheduled_tokens for row in plan.rows) == 3 + 3
    assert (victim.num_plans_in_flight, victim.num_pending) == (0, 0)
    engine.run_until_idle()
    assert len(engine.told[victim.request_id]) == 20


def test_oldest_request_of_a_tenant_gives_way_for_shares_only_so_often() -> None:
    engine = engine_with(num_blocks=8, rows=8)
    only = Request("only", list(range(10)), 4, tenant="wide")  # five of seven blocks, in the end all
    engine.add(only)
    engine.step()
    for i in range(20):
        add(engine, f"narrow-{i}", tenant="narrow", num_output=1)
        engine.step()
        assert only.num_preemptions <= MAX_GAVE_WAY
    assert only.num_preemptions == MAX_GAVE_WAY
    engine.run_until_idle()
    assert len(engine.told["only"]) == 4


def test_who_has_a_right_pushes_in_although_running_requests_lack_blocks() -> None:
    engine = engine_with(num_blocks=9, rows=8)
    for i in range(4):
        add(engine, f"flood-{i}", tenant="flood")
    engine.step()
    engine.step()
    add(engine, "light", tenant="light", num_output=1)
    plan = engine.plan()
    assert plan is not None
    assert {reason for _, reason in preempted(plan)} >= {PreemptReason.BLOCKS}
    assert "light" in [row.request.request_id for row in plan.rows]
