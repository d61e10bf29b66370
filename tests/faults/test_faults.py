"""The short form of `make faults`: one cluster of real processes, 64 streams and more, a fault after the other.

What is asserted is what the promise says: nothing lost, nothing wrong, nothing left behind. Pauses are judged by the
long form, on a machine of its own.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

from tests.faults import specials
from tests.faults.grid import Kind, Outcome, run_cell
from tests.faults.site import Moment, Site, running_site

_STALL_S = 2.0
_STAND_S = 3.0
_LIMIT_S = 120.0


class SiteOfModule:
    """A site that stays up for the tests of this file; each runs on its loop."""

    def __init__(self, runner: asyncio.Runner, site: Site) -> None:
        self._runner = runner
        self.site = site

    def cell(self, stage: str, kind: Kind, moment: Moment) -> Outcome:
        return self._run(run_cell(self.site, stage, kind, moment, _STAND_S))

    def special(self, case: specials.Special) -> Outcome:
        return self._run(case(self.site))

    def _run(self, case: object) -> Outcome:
        with self.site.cluster.logs_on_failure():
            outcome: Outcome = self._runner.run(asyncio.wait_for(case, _LIMIT_S))  # type: ignore[arg-type]
            assert not outcome.problems, "\n".join(outcome.problems)
            return outcome


@pytest.fixture(scope="module")
def faults() -> Iterator[SiteOfModule]:
    with asyncio.Runner() as runner:
        context = running_site(_STALL_S)
        site = runner.run(context.__aenter__())
        try:
            yield SiteOfModule(runner, site)
        finally:
            runner.run(context.__aexit__(None, None, None))


@pytest.mark.parametrize(
    ("stage", "kind", "moment"),
    [
        ("executor", "kill", "decode"),
        ("executor", "truncate", "last"),
        ("executor", "stop", "decode"),
        ("scheduler", "kill", "recovery"),
        ("scheduler", "cut", "decode"),
        ("tokenizer-0", "kill", "decode"),
        ("tokenizer-0", "blackhole", "last"),
    ],
)
def test_under_a_fault_nothing_is_lost_and_every_answer_is_the_undisturbed_one(
    faults: SiteOfModule, stage: str, kind: Kind, moment: Moment
) -> None:
    outcome = faults.cell(stage, kind, moment)
    assert outcome.num_requests >= 64
    assert outcome.pause_p99_s is not None


def test_executor_scheduler_and_both_tokenizers_are_killed_at_once(faults: SiteOfModule) -> None:
    faults.special(specials.all_at_once)


def test_steps_that_lack_memory_are_computed_again(faults: SiteOfModule) -> None:
    faults.special(specials.memory_exhausted)


def test_rows_with_nan_logits_fail_alone_with_an_error_that_says_so(faults: SiteOfModule) -> None:
    faults.special(specials.logits_are_nan)


def test_a_recorder_on_a_full_disk_holds_no_request_up(faults: SiteOfModule) -> None:
    faults.special(specials.full_disk)
