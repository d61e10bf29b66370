"""Which checks run, what becomes of their ends, and the command's exit codes."""

from __future__ import annotations

import asyncio
import json
from typing import cast

import pytest

from tokenloom.api.v1 import executor_pb2
from tokenloom.common.errors import InvalidArgument, SetupError
from tokenloom.common.executor_client import ExecutorClient
from tokenloom.conformance import __main__ as command
from tokenloom.conformance import suite
from tokenloom.conformance.check import CHECKS, Check, add_check
from tokenloom.conformance.lab import Lab
from tokenloom.conformance.results import Failed, Skipped
from tokenloom.conformance.suite import Outcome, Report, selected


def test_all_checks_or_those_that_are_named_in_the_order_of_the_list() -> None:
    names = list(CHECKS)
    assert [one.name for one in selected(())] == names
    assert [one.name for one in selected((names[4], names[1]))] == [names[1], names[4]]
    with pytest.raises(SetupError, match="--only: there is no check 'nothing'; --list shows them"):
        selected((names[0], "nothing"))


def test_no_two_checks_have_one_name() -> None:
    name = next(iter(CHECKS))
    with pytest.raises(AssertionError, match=f"two checks are named {name}"):
        add_check(name, "", CHECKS[name].run)


@pytest.mark.parametrize(
    ("end", "verdict", "seen"),
    [
        (None, "PASS", "fine"),
        (Failed("broken"), "FAIL", "broken"),
        (Skipped("cannot"), "SKIP", "cannot"),
        (InvalidArgument("no"), "FAIL", "INVALID_ARGUMENT where nobody expected it: no"),
    ],
)
def test_each_end_of_a_check_has_its_verdict(end: Exception | None, verdict: str, seen: str) -> None:
    async def body(lab: Lab) -> str:
        if end is not None:
            raise end
        return "fine"

    lab = Lab(cast(ExecutorClient, None), executor_pb2.GetCapabilitiesResponse(), 0.0)
    outcome = asyncio.run(suite._run(Check("one", "The rule.", body), lab))
    assert (outcome.verdict, outcome.seen, outcome.rule) == (verdict, seen, "The rule.")
    assert ("The rule." in str(outcome)) == (verdict == "FAIL")


@pytest.mark.parametrize(("verdicts", "code"), [(("PASS", "SKIP"), 0), (("PASS", "FAIL"), 1), ((), 0)])
@pytest.mark.parametrize("as_json", [False, True])
def test_the_exit_code_tells_whether_something_failed(
    verdicts: tuple[str, ...],
    code: int,
    as_json: bool,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    report = Report("an executor", [Outcome(f"check-{v}", v, "Rule.", "seen", 0.1) for v in verdicts])

    async def run_suite(settings: object, tell: object) -> Report:
        return report

    monkeypatch.setattr(command, "run_suite", run_suite)
    assert command.main(["--json"] if as_json else []) == code
    told = capsys.readouterr().out
    if as_json:
        assert json.loads(told)["is_conformant"] == (code == 0)
    else:
        assert told.startswith(f"an executor: {verdicts.count('PASS')} passed, {verdicts.count('FAIL')} failed")
