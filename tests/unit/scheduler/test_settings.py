"""Settings of the scheduler: what is malformed, or does not go together, is refused at the start and named."""

from __future__ import annotations

import pytest

from tests.unit.scheduler.engine_stack import fake_capabilities
from tokenloom.common.config import ProcessSettings, parse
from tokenloom.common.errors import SetupError
from tokenloom.scheduler.config import SchedulerSettings
from tokenloom.scheduler.core.config import SchedulingPolicy


def settings_of(*argv: str) -> SchedulerSettings:
    return parse(SchedulerSettings, "tokenloom scheduler", "", argv)


@pytest.mark.parametrize("value", ["0", "4", "-1", "two", "1.5", ""])
def test_plans_in_flight_are_one_to_three(value: str) -> None:
    with pytest.raises(SetupError, match=r"--plans-in-flight: .* is not accepted; expected 1, 2 or 3"):
        settings_of("--plans-in-flight", value)


def test_plans_in_flight_are_checked_in_the_variable_and_in_code_as_well(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SetupError, match="expected 1, 2 or 3"):
        SchedulerSettings(ProcessSettings(), plans_in_flight=4)
    monkeypatch.setenv("TOKENLOOM_PLANS_IN_FLIGHT", "9")
    with pytest.raises(SetupError, match="TOKENLOOM_PLANS_IN_FLIGHT"):
        settings_of()


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_depths_that_are_allowed(depth: int) -> None:
    assert settings_of("--plans-in-flight", str(depth)).plans_in_flight == depth


@pytest.mark.parametrize(
    ("flag", "value", "words"),
    [
        ("--max-num-waiting-tokens", "0", "at least 1"),
        ("--scheduling-policy", "lifo", "fair, fcfs"),
        ("--num-priority-classes", "0", "at least 1"),
        ("--ageing-s", "-1", "at least 0"),
        ("--ageing-s", "nan", "at least 0"),
        ("--prompt-token-charge", "-0.5", "at least 0"),
        ("--output-token-charge", "inf", "at least 0"),
        ("--max-metric-tenants", "-1", "at least 0"),
    ],
)
def test_malformed_values_are_named_with_the_accepted_form(flag: str, value: str, words: str) -> None:
    with pytest.raises(SetupError) as refused:
        settings_of(flag, value)
    assert flag in str(refused.value)
    assert words in str(refused.value)


def test_values_that_do_not_go_together_are_named() -> None:
    with pytest.raises(SetupError) as refused:
        SchedulerSettings(ProcessSettings(), prompt_token_charge=0.0, output_token_charge=0.0)
    assert all(word in str(refused.value) for word in ("--prompt-token-charge", "--output-token-charge"))


def test_the_core_gets_what_was_set() -> None:
    settings = settings_of(
        *("--max-num-waiting-tokens", "5000", "--scheduling-policy", "fcfs", "--num-priority-classes", "7"),
        *("--ageing-s", "1.5", "--prompt-token-charge", "0.5", "--output-token-charge", "3", "--max-num-waiting", "9"),
    )
    config = fake_capabilities().scheduler_config(settings)
    assert (config.max_num_waiting, config.max_num_waiting_tokens) == (9, 5000)
    assert (config.policy, config.num_priority_classes, config.ageing_s) == (SchedulingPolicy.FCFS, 7, 1.5)
    assert (config.prompt_token_charge, config.output_token_charge) == (0.5, 3.0)


def test_rows_are_no_more_than_the_token_budget() -> None:
    config = fake_capabilities().scheduler_config(settings_of("--max-num-batched-tokens", "48"))
    assert (config.max_num_seqs, config.max_num_batched_tokens) == (48, 48)


def test_rows_are_no_more_than_the_token_budget_of_a_smaller_executor() -> None:
    config = fake_capabilities(max_num_batched_tokens=16).scheduler_config(settings_of("--max-num-seqs", "64"))
    assert (config.max_num_seqs, config.max_num_batched_tokens) == (16, 16)
