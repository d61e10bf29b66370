"""What a tokenizer sends becomes what the core takes; what is malformed is named."""

from __future__ import annotations

import math
from typing import Any

import pytest

from tests.unit.scheduler.engine_stack import fake_capabilities
from tokenloom.api.v1 import common_pb2, engine_pb2, executor_pb2
from tokenloom.common.errors import InvalidArgument
from tokenloom.scheduler.convert import execute_request_of, request_of, tenant_policy_of
from tokenloom.scheduler.core.plan import ScheduledRow, SchedulerOutput
from tokenloom.scheduler.core.request import Request
from tokenloom.scheduler.core.tenants import TenantPolicy

NOW_S = 1000.0


def request(**fields: Any) -> Request:
    fields = {"request_id": "a", "prompt_token_ids": [5], "stop": common_pb2.StopConditions(max_tokens=4), **fields}
    return request_of(engine_pb2.Submit(**fields), fake_capabilities(), NOW_S)


def test_a_submit_without_time_tenant_or_class_has_none() -> None:
    plain = request()
    assert (plain.deadline_s, plain.submitted_s, plain.tenant, plain.priority_class) == (None, NOW_S, "", 0)


def test_times_are_durations_and_become_points_on_the_engines_clock() -> None:
    resubmitted = request(remaining_time_ms=1500, age_ms=2500)
    assert (resubmitted.deadline_s, resubmitted.submitted_s) == (1001.5, 997.5)


def test_no_time_left_is_a_deadline_that_has_come() -> None:
    assert request(remaining_time_ms=0).deadline_s == NOW_S


def test_tenant_and_class_are_passed_on() -> None:
    named = request(tenant="blüe", priority_class=9)
    assert (named.tenant, named.priority_class) == ("blüe", 9)


@pytest.mark.parametrize("name", ["x" * 257, "ü" * 129])
def test_a_tenants_name_has_at_most_256_bytes(name: str) -> None:
    with pytest.raises(InvalidArgument, match="the most is 256") as refused:
        request(tenant=name)
    assert refused.value.field == "tenant"
    with pytest.raises(InvalidArgument, match="the most is 256"):
        tenant_policy_of(engine_pb2.TenantPolicy(tenant=name))
    assert request(tenant="ü" * 128).tenant


def test_an_absent_weight_is_one_and_absent_limits_are_none() -> None:
    assert tenant_policy_of(engine_pb2.TenantPolicy(tenant="a")) == TenantPolicy()


def test_a_policy_is_passed_on() -> None:
    proto = engine_pb2.TenantPolicy(
        tenant="a", weight=2.5, max_num_running=1, max_num_waiting=2, max_tokens_per_minute=3
    )
    assert tenant_policy_of(proto) == TenantPolicy(2.5, 1, 2, 3)


@pytest.mark.parametrize("weight", [0.0, -1.0, math.inf, -math.inf, math.nan])
def test_a_weight_is_finite_and_above_zero(weight: float) -> None:
    with pytest.raises(InvalidArgument, match=r"weight of tenant 'a'.*from 0.001 to 1000") as refused:
        tenant_policy_of(engine_pb2.TenantPolicy(tenant="a", weight=weight))
    assert refused.value.field == "tenants.weight"


@pytest.mark.parametrize("name", ["max_num_running", "max_num_waiting", "max_tokens_per_minute"])
def test_a_limit_is_at_least_one_or_absent(name: str) -> None:
    limits: dict[str, Any] = {name: 0}
    with pytest.raises(InvalidArgument, match=f"{name} of tenant 'a' is 0") as refused:
        tenant_policy_of(engine_pb2.TenantPolicy(tenant="a", **limits))
    assert refused.value.field == f"tenants.{name}"


def test_a_new_row_brings_everything_once_and_later_rows_only_what_changed() -> None:
    sampling, stop = common_pb2.SamplingParams(seed=3), common_pb2.StopConditions(max_tokens=9, min_tokens=1)
    new = request(prompt_token_ids=[5, 6, 7], resume_token_ids=[8], sampling=sampling, stop=stop)
    new.payload.trace = common_pb2.TraceContext(traceparent="00-1-2-01")
    old = request(request_id="b")
    rows = [ScheduledRow(new, 11, 4, 0, [1, 2], True, False, True), ScheduledRow(old, 12, 1, 8, [], False, True, True)]
    plan = SchedulerOutput(3, rows, finished_row_ids=[10])
    epoch = executor_pb2.Epoch(boot_id="boot", counter=2)
    message = execute_request_of(plan, epoch, None)
    assert message == executor_pb2.ExecuteRequest(
        epoch=epoch,
        step_id=3,
        finished_row_ids=[10],
        new_rows=[
            executor_pb2.NewRow(
                row_id=11,
                request_id="a",
                prompt_token_ids=[5, 6, 7],
                generated_token_ids=[8],
                sampling=sampling,
                stop=stop,
                trace=new.payload.trace,
            )
        ],
        row_ids=[11, 12],
        num_scheduled_tokens=[4, 1],
        num_computed_tokens=[0, 8],
        feeds_back=[False, True],
        num_new_blocks=[2, 0],
        new_block_ids=[1, 2],
    )
    new.payload.prompt_column = None
    assert execute_request_of(plan, epoch, None) == message, "the request's own list says the same"
