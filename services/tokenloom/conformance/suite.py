"""Runs checks one after the other and tells what came of them."""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tokenloom.common.errors import SetupError, TokenloomError
from tokenloom.common.executor_client import ExecutorClient
from tokenloom.conformance import checks_epochs, checks_plans, checks_sampling, checks_tokens
from tokenloom.conformance.check import CHECKS, Check
from tokenloom.conformance.config import ConformanceSettings
from tokenloom.conformance.lab import Lab
from tokenloom.conformance.results import Failed, Skipped

MODULES = (checks_epochs, checks_plans, checks_tokens, checks_sampling)
"""Importing them fills CHECKS."""


@dataclass(frozen=True)
class Outcome:
    """What came of a check.

    Args:
        verdict: PASS, FAIL or SKIP.
        seen: what was seen, for people.
    """

    name: str
    verdict: str
    rule: str
    seen: str
    seconds: float

    def __str__(self) -> str:
        lines = [f"{self.verdict}  {self.name:<24} {self.seen}"]
        if self.verdict == "FAIL":
            lines.append(f"      {self.rule}")
        return "\n".join(lines)


@dataclass(frozen=True)
class Report:
    """All outcomes."""

    executor: str
    outcomes: list[Outcome]

    @property
    def is_conformant(self) -> bool:
        """Nothing failed."""
        return not self.count("FAIL")

    def count(self, verdict: str) -> int:
        """How many outcomes have this verdict."""
        return sum(outcome.verdict == verdict for outcome in self.outcomes)

    def as_json(self) -> str:
        """All of it, on one line."""
        values = dataclasses.asdict(self)
        counts = {name: self.count(name) for name in ("PASS", "FAIL", "SKIP")}
        return json.dumps({**values, "counts": counts, "is_conformant": self.is_conformant})

    def summary(self) -> str:
        """One line for people."""
        return (
            f"{self.executor}: {self.count('PASS')} passed, {self.count('FAIL')} failed, {self.count('SKIP')} skipped"
        )


def selected(only: Sequence[str]) -> list[Check]:
    """The checks to run; all if `only` is empty.

    Raises: SetupError naming a check that does not exist.
    """
    if unknown := [name for name in only if name not in CHECKS]:
        raise SetupError(f"--only: there is no check {unknown[0]!r}; --list shows them")
    return [one for name, one in CHECKS.items() if not only or name in only]


async def run_suite(settings: ConformanceSettings, tell: Callable[[Outcome], object]) -> Report:
    """Run the checks; `tell` hears of each outcome as it comes.

    Raises: SetupError if the executor does not answer at all, or a check does not exist.
    """
    checks = selected(settings.only)
    client = ExecutorClient(settings.executor, settings.cluster_token, settings.timeout_s)
    try:
        lab = Lab(client, await client.capabilities(), settings.near_tie)
        outcomes = []
        for one in checks:
            outcome = await _run(one, lab)
            tell(outcome)
            outcomes.append(outcome)
    except TokenloomError as error:
        raise SetupError(f"executor {settings.executor}: {error}") from None
    finally:
        await client.close()
    return Report(lab.can.description or lab.can.model_id, outcomes)


async def _run(one: Check, lab: Lab) -> Outcome:
    started_s = time.perf_counter()
    try:
        verdict, seen = "PASS", await one.run(lab)
    except Skipped as reason:
        verdict, seen = "SKIP", str(reason)
    except Failed as reason:
        verdict, seen = "FAIL", str(reason)
    except TokenloomError as error:
        verdict, seen = "FAIL", f"{error.code.name} where nobody expected it: {error}"
    finally:
        lab.end()
    return Outcome(one.name, verdict, one.rule, seen, round(time.perf_counter() - started_s, 3))
