"""The cost benchmark, in short: what cost grows with, and what is not paid twice. Bounds are lax: machines are busy."""

from __future__ import annotations

from loadtest.scheduler.cost import CoreUnderLoad, Load, cost_tables, loads, measure_load, measure_long_prompt
from loadtest.scheduler.split import difference, split_table

_NUM_STEPS = 60
_LAX = 3.0


def p50_ms(load: Load) -> float:
    """The lowest of three medians: a neighbour on this machine only ever adds."""
    return min(float(str(measure_load(load, _NUM_STEPS)["p50_ms"])) for _ in range(3))


def test_in_a_steady_state_every_running_request_is_in_every_plan() -> None:
    load = Load("x", 12, num_blocks=2000, num_tenants=2, num_classes=3, num_waiting=5)
    core = CoreUnderLoad(load)
    for _ in range(3):
        core.step_s()
        assert len(core.core.plans_in_flight[-1].rows) == 12
        assert all(row.samples for row in core.core.plans_in_flight[-1].rows)
    assert len(core.core.waiting) == 5


def test_a_chunk_of_a_prompt_goes_beside_the_decoding_rows() -> None:
    core = CoreUnderLoad(Load("x", 8, num_blocks=4000, chunk_tokens=64))
    for _ in range(10):
        core.step_s()
    plan = core.core.plans_in_flight[-1]
    assert len(plan.rows) == 9
    assert plan.num_scheduled_tokens == 8 + 64


def test_the_cache_is_full_where_it_is_said_to_be() -> None:
    core = CoreUnderLoad(Load("x", 4, num_blocks=4200, is_cache_full=True)).core
    assert core.kv.pool.num_cached_blocks > 0.9 * 4200


def test_cost_grows_with_the_rows_of_a_step_and_no_faster() -> None:
    small, large = p50_ms(Load("16", 16)), p50_ms(Load("256", 256))
    assert large < 256 / 16 * small * _LAX


def test_cost_grows_neither_with_blocks_nor_with_those_that_wait() -> None:
    base = p50_ms(Load("base", 64, num_blocks=2_000))
    assert p50_ms(Load("blocks", 64, num_blocks=200_000)) < base * _LAX
    assert p50_ms(Load("waiting", 64, num_blocks=2_000, num_waiting=5_000)) < base * _LAX


def test_a_known_prefix_is_looked_up_without_hashing_it_again() -> None:
    rows = {row["name"]: float(str(row["p50_ms"])) for row in measure_long_prompt(5)}
    hashing = rows["add_request, prompt unknown (hashes all blocks)"]
    assert rows["prefix look-up, another one computes the prefix"] < hashing / 50
    assert rows["prefix look-up, all blocks cached"] < hashing / 2


def test_the_tables_have_a_line_for_each_case() -> None:
    steps = [measure_load(Load("only", 4, num_blocks=2000), 3)]
    assert len(cost_tables(steps, measure_long_prompt(1)).splitlines()) == 2 + 1 + 6
    assert [load.num_running for load in loads()][:4] == [16, 64, 256, 1024]


def test_the_split_table_says_what_each_hop_adds() -> None:
    def row(arrangement: str, us_per_step: float) -> dict[str, object]:
        return {
            "arrangement": arrangement,
            "num_rows": 2,
            "plans_in_flight": 1,
            "us_per_step": us_per_step,
            "us_per_token": us_per_step / 2,
            "scheduler_cpu_us_per_step": 1.0,
        }

    rows = [row("local", 20.0), row("execute", 50.0), row("session", 90.0)]
    assert difference(rows[0], None) is None
    assert difference(rows[2], rows[1]) == 40.0
    assert [line.split()[-1] for line in split_table(rows).splitlines()[1:4]] == ["-", "30.0", "40.0"]
