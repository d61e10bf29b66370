"""Long prompts do not hold up short ones, and a prefix in the making is computed once."""

import pytest

from tests.unit.scheduler.core_simulation.simulation import Simulation
from tokenloom.scheduler.core.request import FinishReason
from tokenloom.scheduler.core.scheduler import SchedulerConfig

CONFIG = SchedulerConfig(max_num_seqs=64, max_num_batched_tokens=512, max_model_len=32_768)


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize(("num_long", "num_more_steps"), [(1, 2), (3, 4)])
@pytest.mark.parametrize("tenants", [("one", "one"), ("one", "other")], ids=["one tenant", "two tenants"])
def test_short_prompts_get_their_first_token_soon_behind_long_ones(
    depth: int, num_long: int, num_more_steps: int, tenants: tuple[str, str]
) -> None:
    alone = Simulation(CONFIG, depth=depth)
    solo_steps = alone.run_until(alone.submit("alone", 20, 4)).steps_to_first_token
    simulation = Simulation(CONFIG, depth=depth)
    long = [simulation.submit(f"long-{i}", 8192, 4, tenant=tenants[0]) for i in range(num_long)]
    simulation.step()
    for i in range(10):
        simulation.submit(f"short-{i}", 20, 4, tenant=tenants[1])
        simulation.step()
    simulation.run(num_more_steps + solo_steps)
    for life in simulation.of("short-"):
        assert life.steps_to_first_token <= solo_steps + num_more_steps
    simulation.run_until_idle()
    assert all(life.steps_to_end <= num_long * 8192 / 256 + 30 for life in long)


def test_what_a_short_prompt_leaves_of_the_budget_goes_to_the_long_one_before_it() -> None:
    simulation = Simulation(CONFIG, depth=1)
    simulation.submit("long", 4000, 1)
    simulation.submit("short", 10, 1)
    simulation.step()
    assert [row.num_scheduled_tokens for row in simulation.plans[0].rows] == [502, 10]


def test_many_cold_requests_with_one_prefix_compute_it_once() -> None:
    simulation = Simulation(CONFIG)
    prefix = list(range(1000, 1384))
    for i in range(32):
        simulation.submit(f"cold-{i}", prompt=prefix + [i * 50 + j for j in range(10)], num_output_tokens=1)
    simulation.run_until_idle()
    assert simulation.num_row_tokens == 384 + 32 * 10
    assert simulation.served("") == 384 + 32 * 10 + 32
    assert simulation.core.stats.num_computed_tokens == 384 + 32 * 10


def test_tenants_share_a_prefix_in_the_making_and_pay_for_what_was_computed_for_them() -> None:
    simulation = Simulation(CONFIG)
    prefix = list(range(1000, 1384))
    for i in range(32):
        prompt = [*prefix, i]
        simulation.submit(f"cold-{i}", prompt=prompt, num_output_tokens=1, tenant=str(i % 4), priority_class=i % 3)
    simulation.run_until_idle()
    assert simulation.num_row_tokens == 384 + 32
    assert sum(simulation.served(str(i)) for i in range(4)) == 384 + 32 + 32


@pytest.mark.parametrize("num_choices", [2, 8])
def test_choices_of_one_call_compute_their_prompt_once_but_for_its_last_block(num_choices: int) -> None:
    simulation = Simulation(CONFIG)
    prompt = list(range(2000, 2100))
    for i in range(num_choices):
        simulation.submit(f"choice-{i}", prompt=prompt, num_output_tokens=1)
    simulation.run_until_idle()
    assert simulation.num_row_tokens == 96 + 4 * num_choices


def test_waiting_for_a_prefix_holds_up_nobody_behind() -> None:
    simulation = Simulation(CONFIG)
    prefix = list(range(1000, 1000 + 6000))
    for i in range(3):
        simulation.submit(f"shares-{i}", prompt=[*prefix, i], num_output_tokens=2)
    simulation.step()
    other = simulation.submit("other", 20, 2)
    assert simulation.run_until(other).steps_to_first_token <= 4


def test_more_choices_than_rows_of_one_long_prompt_hold_up_nobody_behind() -> None:
    simulation = Simulation(SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=512, max_model_len=32_768))
    for i in range(40):
        simulation.submit(f"choice-{i}", prompt=list(range(8000)), num_output_tokens=2)
    simulation.step()
    short = simulation.submit("short", 20, 2)
    assert simulation.run_until(short).steps_to_first_token <= 4


def test_prefix_is_computed_by_another_when_its_first_reader_goes_away() -> None:
    simulation = Simulation(CONFIG)
    prefix = list(range(1000, 1000 + 2000))
    for i in range(3):
        simulation.submit(f"shares-{i}", prompt=[*prefix, i], num_output_tokens=2)
    simulation.run(2)
    simulation.core.finish("shares-0", FinishReason.ABORTED)
    del simulation.lives["shares-0"]
    for i in (1, 2):
        simulation.run_until(simulation.lives[f"shares-{i}"])
    assert simulation.num_row_tokens <= 2000 + 2 * 512 + 6 + 32
