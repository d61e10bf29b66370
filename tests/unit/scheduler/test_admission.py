"""What is refused, in which words, and that a refusal changes nothing."""

import pytest

from tokenloom.scheduler.core.request import Request, RequestRefused
from tokenloom.scheduler.core.scheduler import Scheduler, SchedulerConfig
from tokenloom.scheduler.core.tenants import TenantPolicy


def small_scheduler() -> Scheduler:
    """Room for 12 tokens in KV memory, 10 in the context, 2 requests in the queue."""
    return Scheduler(SchedulerConfig(block_size=4, max_model_len=10, max_num_waiting=2), num_blocks=4)


def refusal_of(scheduler: Scheduler, request: Request) -> RequestRefused:
    before = (scheduler.num_requests, len(scheduler.waiting), request.max_output_tokens)
    with pytest.raises(RequestRefused) as refused:
        scheduler.add_request(request)
    assert (scheduler.num_requests, len(scheduler.waiting), request.max_output_tokens) == before
    return refused.value


@pytest.mark.parametrize("num_tokens", [10, 11, 500])
def test_prompt_that_leaves_no_room_is_refused_with_both_numbers(num_tokens: int) -> None:
    refusal = refusal_of(small_scheduler(), Request("a", [1] * num_tokens, 100))
    assert f"{num_tokens} tokens" in str(refusal)
    assert "together can have 10" in str(refusal)
    assert (refusal.field, refusal.is_overload) == ("prompt", False)


def test_kv_memory_smaller_than_the_context_bounds_a_request() -> None:
    scheduler = Scheduler(SchedulerConfig(block_size=4, max_model_len=1000), num_blocks=4)
    assert scheduler.max_request_tokens == 12
    assert "together can have 12" in str(refusal_of(scheduler, Request("a", [1] * 12, 1)))


def test_output_is_limited_to_what_fits() -> None:
    scheduler = small_scheduler()
    request = Request("a", [1] * 7, 100)
    scheduler.add_request(request)
    assert request.max_output_tokens == 3


def test_empty_prompt_is_refused() -> None:
    refusal = refusal_of(small_scheduler(), Request("a", [], 1))
    assert "empty" in str(refusal)
    assert refusal.field == "prompt"


@pytest.mark.parametrize("max_output_tokens", [0, -1])
def test_no_output_at_all_is_refused(max_output_tokens: int) -> None:
    refusal = refusal_of(small_scheduler(), Request("a", [1], max_output_tokens))
    assert f"max_tokens is {max_output_tokens}" in str(refusal)
    assert refusal.field == "max_tokens"


def test_resumed_output_that_is_complete_is_refused_with_both_numbers() -> None:
    refusal = refusal_of(small_scheduler(), Request("a", [1] * 6, 100, output_token_ids=[1] * 4))
    assert "has 4 tokens and may have 4" in str(refusal)
    assert refusal.field == "resume_token_ids"


def test_id_of_a_living_request_is_refused_and_of_an_ended_one_is_not() -> None:
    scheduler = small_scheduler()
    scheduler.add_request(Request("a", [1], 1, deadline_s=1.0))
    assert refusal_of(scheduler, Request("a", [1], 1)).field == "request_id"
    scheduler.expire(1.0)
    scheduler.add_request(Request("a", [1], 1))


def test_full_queue_refuses_for_now_with_both_numbers() -> None:
    scheduler = small_scheduler()
    for name in "ab":
        scheduler.add_request(Request(name, [1], 1))
    refusal = refusal_of(scheduler, Request("c", [1], 1))
    assert str(refusal) == "2 requests wait already; the most is 2"
    assert refusal.is_overload


def test_resubmission_is_exempt_from_the_bound_of_the_queue() -> None:
    scheduler = small_scheduler()
    for name in "ab":
        scheduler.add_request(Request(name, [1], 1))
    scheduler.add_request(Request("c", [1], 4, output_token_ids=[2]), is_resubmission=True)
    assert len(scheduler.waiting) == 3


def test_bad_request_is_told_so_even_if_the_queue_is_full() -> None:
    scheduler = small_scheduler()
    for name in "ab":
        scheduler.add_request(Request(name, [1], 1))
    assert not refusal_of(scheduler, Request("c", [1] * 50, 1)).is_overload


def test_what_would_run_at_once_does_not_count_as_waiting_for_a_tenants_limit() -> None:
    scheduler = Scheduler(SchedulerConfig(max_num_seqs=4), num_blocks=64)
    scheduler.set_tenant("a", TenantPolicy(max_num_waiting=1))
    for i in range(5):
        scheduler.add_request(Request(f"a-{i}", [1], 1, tenant="a"))
    refusal = refusal_of(scheduler, Request("a-5", [1], 1, tenant="a"))
    assert (refusal.is_overload, refusal.reason) == (True, "TENANT_QUEUE_FULL")
    scheduler = Scheduler(SchedulerConfig(max_num_seqs=4), num_blocks=64)
    scheduler.set_tenant("b", TenantPolicy(max_num_waiting=1, max_num_running=2))
    for i in range(3):
        scheduler.add_request(Request(f"b-{i}", [1], 1, tenant="b"))
    assert refusal_of(scheduler, Request("b-3", [1], 1, tenant="b")).reason == "TENANT_QUEUE_FULL"


def test_own_less_urgent_request_gives_way_in_a_full_queue() -> None:
    scheduler = Scheduler(SchedulerConfig(max_num_seqs=1, max_num_waiting=2), num_blocks=64)
    for i in range(2):
        scheduler.add_request(Request(f"batch-{i}", [1], 1, tenant="a", priority_class=3))
    displaced = scheduler.add_request(Request("urgent", [1], 1, tenant="a"))
    assert displaced is not None
    assert displaced.request.request_id == "batch-1"
    assert "a more urgent request came" in str(displaced.error)
    assert refusal_of(scheduler, Request("batch-2", [1], 1, tenant="a", priority_class=3)).reason == "QUEUE_FULL"


def test_own_less_urgent_request_gives_way_at_the_tenants_limit() -> None:
    scheduler = Scheduler(SchedulerConfig(max_num_seqs=1), num_blocks=64)
    scheduler.set_tenant("a", TenantPolicy(max_num_waiting=1))
    for i in range(2):
        scheduler.add_request(Request(f"batch-{i}", [1], 1, tenant="a", priority_class=3))
    refusal = refusal_of(scheduler, Request("batch-2", [1], 1, tenant="a", priority_class=3))
    assert refusal.reason == "TENANT_QUEUE_FULL"
    displaced = scheduler.add_request(Request("urgent", [1], 1, tenant="a"))
    assert displaced is not None
    assert displaced.request.request_id == "batch-1"


def test_tokens_that_wait_are_bounded_but_one_request_alone_may_have_more() -> None:
    scheduler = Scheduler(SchedulerConfig(max_num_waiting_tokens=10), num_blocks=64)
    scheduler.add_request(Request("large", [1] * 20, 1))
    assert scheduler.num_waiting_tokens == 20
    refusal = refusal_of(scheduler, Request("b", [1], 1))
    assert (refusal.is_overload, refusal.reason) == (True, "QUEUE_FULL")
    assert "20 tokens wait" in str(refusal)


def test_resubmission_is_exempt_from_all_bounds() -> None:
    scheduler = Scheduler(SchedulerConfig(max_num_seqs=1, max_num_waiting=1, max_num_waiting_tokens=4), num_blocks=64)
    scheduler.set_tenant("a", TenantPolicy(max_num_waiting=1, max_tokens_per_minute=1))
    for i in range(5):
        scheduler.add_request(Request(f"a-{i}", [1, 2, 3], 2, tenant="a"), is_resubmission=True)
    assert len(scheduler.waiting) == 5


def test_more_urgent_request_keeps_its_place_in_a_full_queue() -> None:
    scheduler = Scheduler(SchedulerConfig(max_num_waiting=2), num_blocks=64)
    for i in range(2):
        scheduler.add_request(Request(f"flood-{i}", [1], 1, tenant="flood", priority_class=1))
    assert refusal_of(scheduler, Request("lower", [1], 1, tenant="light", priority_class=2)).reason == "QUEUE_FULL"
    displaced = scheduler.add_request(Request("equal", [1], 1, tenant="light", priority_class=1))
    assert displaced is not None
    assert displaced.request.request_id == "flood-1"
