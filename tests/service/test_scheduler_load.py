"""How busy the engine says it is, in frames, by GetLoad and on the metrics page, also when nothing steps any more."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.fakes import FakeExecutor
from tests.service.scheduler_stack import Tokenizer, run, scheduler_on, submit
from tokenloom.api.v1 import engine_pb2
from tokenloom.common.metrics import MetricsServer, fetch_metrics
from tokenloom.scheduler import load

Samples = dict[str, float]


async def scrape(folder: Path) -> Samples:
    """The page as it is served: `name{label values}` to value."""
    server = MetricsServer(f"unix:{folder}/metrics.sock")
    await server.start()
    page = await fetch_metrics(f"unix:{folder}/metrics.sock")
    await server.stop()
    return {
        sample.name + ("{" + ",".join(sample.labels.values()) + "}" if sample.labels else ""): sample.value
        for family in text_string_to_metric_families(page.decode())
        for sample in family.samples
    }


async def get_load(tokenizer: Tokenizer) -> engine_pb2.Load:
    response: engine_pb2.GetLoadResponse = await tokenizer.stub.GetLoad(engine_pb2.GetLoadRequest(), timeout=5)
    return response.load


def loads_of(tokenizer: Tokenizer) -> list[engine_pb2.Load]:
    return [frame.load for frame in tokenizer.frames if frame.HasField("load")]


def test_every_session_is_told_the_load_at_most_once_a_period(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load, "REPORT_PERIOD_S", 0.2)

    async def test() -> None:
        async with scheduler_on(tmp_path, FakeExecutor(step_s=0.005), max_num_seqs=2):
            busy, watching = Tokenizer(tmp_path), Tokenizer(tmp_path)
            await busy.open()
            await watching.open()
            began_s = time.monotonic()
            await busy.send(submits=[submit(i, [i] * 5, 60) for i in range(1, 6)])
            await busy.read_until_ended(*range(1, 6))
            took_s = time.monotonic() - began_s
            while not (loads := loads_of(watching)) or loads[-1].num_running or len(loads) < 3:
                await watching.read_frame()
            for tokenizer in (busy, watching):
                assert len(loads_of(tokenizer)) <= took_s / 0.2 + 3
            told = next(each for each in loads if each.num_running)
            assert (told.num_running, told.max_num_seqs, told.num_blocks) == (2, 2, 63)
            assert told.num_waiting_tokens == 5 * told.num_waiting > 0
            assert any(each.tokens_per_second > 0 for each in loads)
            await busy.close()
            await watching.close()

    run(test())


def test_a_mass_abort_leaves_an_idle_engine_in_every_view_though_nothing_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """D22: gauges that are written when the engine steps stay up for ever."""
    monkeypatch.setattr(load, "REPORT_PERIOD_S", 0.05)

    async def test() -> None:
        executor = FakeExecutor(step_s=0.002, num_blocks=200)
        async with scheduler_on(tmp_path, executor, max_num_seqs=16) as stage:
            tokenizer = Tokenizer(tmp_path)
            await tokenizer.open()
            calm = await scrape(tmp_path)
            handles = list(range(1, 51))
            await tokenizer.send(submits=[submit(i, [i % 7] * 9, 100, group_id=f"call-{min(i, 40)}") for i in handles])
            while len(tokenizer.tokens) < 10:
                await tokenizer.read()
            storm = await scrape(tmp_path)
            assert storm["tokenloom_num_requests_running"] == 16
            assert storm["tokenloom_num_requests_waiting"] == 34
            by_reason = [v for name, v in storm.items() if name.startswith("tokenloom_num_requests_waiting_by_reason")]
            assert sum(by_reason) == 34
            assert storm["tokenloom_kv_cache_usage_perc"] > 0
            await tokenizer.send(cancels=[engine_pb2.Cancel(handle=i, reason="client_disconnected") for i in handles])
            await tokenizer.read_until_ended(*handles)
            assert stage.engine.core is not None
            while stage.engine.core.plans_in_flight:
                await asyncio.sleep(0.005)
            idle = await scrape(tmp_path)
            for name in ("num_requests_running", "num_requests_waiting", "num_waiting_tokens"):
                assert idle[f"tokenloom_{name}"] == 0, name
            assert idle["tokenloom_kv_cache_usage_perc"] == calm["tokenloom_kv_cache_usage_perc"] == 0
            aborted = "tokenloom_request_success_total{aborted}"
            assert idle[aborted] - calm.get(aborted, 0) == 50
            assert not [name for name, value in idle.items() if value < 0 and name.startswith("tokenloom_")]
            now = await get_load(tokenizer)
            assert (now.num_running, now.num_waiting, now.num_waiting_tokens) == (0, 0, 0)
            assert now.num_free_blocks == now.num_blocks == 199
            assert now.num_cached_blocks > 0, "cached blocks are free ones"
            while (last := loads_of(tokenizer)[-1:]) and (last[0].num_running or last[0].num_waiting):
                await tokenizer.read_frame()
            assert last
            await tokenizer.close()

    run(test())


def test_what_is_counted_means_what_it_says(tmp_path: Path) -> None:
    async def test() -> None:
        async with scheduler_on(tmp_path, FakeExecutor(step_s=0.002), max_num_seqs=4, max_metric_tenants=1):
            tokenizer = Tokenizer(tmp_path)
            await tokenizer.open()
            before = await scrape(tmp_path)
            await tokenizer.send(
                submits=[
                    submit(1, [1] * 10, 5, tenant="a"),
                    submit(2, [2] * 6, 7, tenant="b"),
                    submit(3, [5, 1000]),
                    submit(4, [4], 50, tenant="c", remaining_time_ms=0),
                ]
            )
            await tokenizer.read_until_ended(1, 2, 3, 4)
            await tokenizer.send(submits=[submit(5, [1] * 10, 1, tenant="a")])
            await tokenizer.read_until_ended(5)
            after = await scrape(tmp_path)

            def rise(name: str) -> float:
                return after[name] - before.get(name, 0)

            assert rise("tokenloom_prompt_tokens_total") == 10 + 6 + 10
            assert rise("tokenloom_generation_tokens_total") == 5 + 7 + 1
            assert rise("tokenloom_engine_time_to_first_token_seconds_count") == 3
            assert rise("tokenloom_engine_inter_token_latency_seconds_count") == 4 + 6, "a gap per token but the first"
            assert rise("tokenloom_engine_request_time_per_output_token_seconds_count") == 2, "two have more than one"
            assert rise("tokenloom_request_queue_time_seconds_count") == 3
            assert rise("tokenloom_engine_e2e_request_latency_seconds_count") == 4
            assert rise("tokenloom_request_success_total{length}") == 3
            assert rise("tokenloom_request_success_total{deadline}") == 1
            assert rise("tokenloom_requests_refused_total{INVALID_ARGUMENT}") == 1
            gaps_s = rise("tokenloom_engine_inter_token_latency_seconds_sum")
            assert gaps_s >= 10 * 0.002, "a step takes that long"
            assert after["tokenloom_prefix_cache_queries_total"] == 10 + 6 + 10
            assert after["tokenloom_prefix_cache_hits_total"] == 8, "two blocks of four"
            assert after["tokenloom_computed_tokens_total"] >= 10 + 6 + 2 + 4 + 6
            assert after["tokenloom_tenant_tokens_total{a}"] == 10 + 5 + 2 + 1
            assert after["tokenloom_tenant_tokens_total{other}"] == 6 + 7
            assert after["tokenloom_tenant_requests_running{a}"] == 0
            assert "tokenloom_tenant_tokens_total{b}" not in after
            await tokenizer.close()

    run(test())
