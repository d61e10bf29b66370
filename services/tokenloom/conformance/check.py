"""What a check is, and the list of all."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from tokenloom.conformance.lab import Lab

CheckBody = Callable[[Lab], Awaitable[str]]


@dataclass(frozen=True)
class Check:
    """One rule of the protocol, and how it is tried.

    Args:
        rule: in one sentence, for whoever writes an executor.
        run: returns what was seen. Raises Failed, Skipped, or TokenloomError for an answer that nobody expected.
    """

    name: str
    rule: str
    run: CheckBody


CHECKS: dict[str, Check] = {}
"""All checks by name, in the order in which they run."""


def check(name: str) -> Callable[[CheckBody], CheckBody]:
    """Add a function to the checks; its docstring is the rule."""

    def add(body: CheckBody) -> CheckBody:
        add_check(name, body.__doc__ or "", body)
        return body

    return add


def add_check(name: str, rule: str, body: CheckBody) -> None:
    """Add a check."""
    assert name not in CHECKS, f"two checks are named {name}"
    CHECKS[name] = Check(name, " ".join(rule.split()), body)
