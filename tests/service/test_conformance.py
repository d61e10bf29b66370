"""The conformance checks pass on good executors, and each one sees the fault that it is for."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from tests.fakes import FakeExecutor
from tests.service.conformance_mutants import MUTANTS, Fake
from tests.service.executor_stack import Client, run_with_executor
from tests.service.recording_stack import serving
from tests.tiny_models import write_tiny_model
from tokenloom.cli import main as command
from tokenloom.common.errors import SetupError
from tokenloom.conformance.check import CHECKS
from tokenloom.conformance.config import ConformanceSettings
from tokenloom.conformance.suite import Report, run_suite

LIMIT_S = 60.0


def conformance_of(folder: Path, executor: FakeExecutor, *only: str, timeout_s: float = 5.0) -> Report:
    async def test() -> Report:
        async with asyncio.timeout(LIMIT_S), serving(folder, executor) as address:
            settings = ConformanceSettings(executor=address, only=only, timeout_s=timeout_s)
            return await run_suite(settings, lambda outcome: None)

    return asyncio.run(test())


def verdicts(report: Report) -> dict[str, str]:
    return {outcome.name: f"{outcome.verdict} {outcome.seen}" for outcome in report.outcomes}


@pytest.mark.parametrize("block_size", [1, 4, 16])
def test_the_fake_executor_passes_every_check(tmp_path: Path, block_size: int) -> None:
    executor = FakeExecutor(num_blocks=512, block_size=block_size)
    report = conformance_of(tmp_path, executor)
    assert {outcome.verdict for outcome in report.outcomes} == {"PASS"}, verdicts(report)
    assert [outcome.name for outcome in report.outcomes] == list(CHECKS)


def test_our_executor_passes_every_check(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOKENLOOM_CACHE", str(tmp_path / "cache"))
    folder = write_tiny_model(tmp_path / "model", "llama")
    reports: list[Report] = []

    async def test(client: Client) -> None:
        settings = ConformanceSettings(executor=f"unix:{tmp_path}/executor.sock", timeout_s=20.0)
        reports.append(await run_suite(settings, lambda outcome: None))

    run_with_executor(test, folder, tmp_path)
    (report,) = reports
    assert {outcome.verdict for outcome in report.outcomes} == {"PASS"}, verdicts(report)


def test_there_is_a_fault_for_each_check() -> None:
    assert MUTANTS.keys() == CHECKS.keys()


@pytest.mark.parametrize("name", CHECKS)
def test_each_check_sees_its_fault(tmp_path: Path, name: str) -> None:
    report = conformance_of(tmp_path, MUTANTS[name](), name, timeout_s=1.0)
    (outcome,) = report.outcomes
    assert outcome.verdict == "FAIL", outcome
    assert not report.is_conformant
    assert outcome.rule in str(outcome), "who fails is told the rule"


class NearTies(Fake):
    """Not batch invariant: beside others it takes the second best token, which is as good to within 0.05."""

    def __init__(self) -> None:
        super().__init__()
        self.capabilities.batch_invariant = False

    num_rows_of_plan = 0

    def run(self, plan, last_step_id):  # type: ignore[no-untyped-def]
        self.num_rows_of_plan = len(plan.row_ids)
        return super().run(plan, last_step_id)

    def pick(self, row, first):  # type: ignore[no-untyped-def]
        return super().pick(row, first) + (self.num_rows_of_plan > 1)


@pytest.mark.parametrize(("near_tie", "verdict"), [(0.001, "FAIL"), (0.1, "SKIP")])
def test_executors_that_are_not_batch_invariant_may_differ_at_near_ties_alone(
    tmp_path: Path, near_tie: float, verdict: str
) -> None:
    async def test() -> Report:
        async with asyncio.timeout(LIMIT_S), serving(tmp_path, NearTies()) as address:
            settings = ConformanceSettings(executor=address, only=("batching",), near_tie=near_tie, timeout_s=5.0)
            return await run_suite(settings, lambda outcome: None)

    (outcome,) = asyncio.run(test()).outcomes
    assert outcome.verdict == verdict, outcome
    assert "token" in outcome.seen


def test_a_silent_executor_and_an_unknown_check_are_told_in_one_line(tmp_path: Path) -> None:
    with pytest.raises(SetupError, match="no check 'nothing'"):
        conformance_of(tmp_path, Fake(), "nothing")
    settings = ConformanceSettings(executor=f"unix:{tmp_path}/nobody", timeout_s=0.3)
    with pytest.raises(SetupError, match="executor unix:"):
        asyncio.run(run_suite(settings, lambda outcome: None))


def test_the_command_lists_rules_without_an_executor(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["tokenloom", "conformance", "--list"])
    with pytest.raises(SystemExit) as end:
        command()
    assert end.value.code == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == list(CHECKS)
    assert all(len(line.split()) > 6 for line in lines)


def test_the_report_is_json_too(tmp_path: Path) -> None:
    report = conformance_of(tmp_path, MUTANTS["greedy"](), "greedy", "finish-only", timeout_s=2.0)
    told = json.loads(report.as_json())
    assert told["counts"] == {"PASS": 1, "FAIL": 1, "SKIP": 0}
    assert not told["is_conformant"]
    assert {one["name"]: one["verdict"] for one in told["outcomes"]} == {"greedy": "FAIL", "finish-only": "PASS"}
    assert "1 passed, 1 failed" in report.summary()
