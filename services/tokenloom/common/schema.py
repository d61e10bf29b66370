"""Revision of the frames between stages; a stage works with peers one revision apart."""

from __future__ import annotations

from tokenloom.common.errors import FailedPrecondition

SCHEMA_REVISION = 1


def check_revision(theirs: int, peer: str) -> None:
    """Raise FailedPrecondition if `peer`, as messages shall call it, is more than one revision away."""
    if abs(theirs - SCHEMA_REVISION) > 1:
        raise FailedPrecondition(
            f"the {peer} speaks schema revision {theirs}, this stage {SCHEMA_REVISION}; they may be one apart",
            field="schema_revision",
        )
