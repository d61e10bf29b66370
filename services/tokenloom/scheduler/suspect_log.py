"""Log lines on requests that may have killed the executor."""

from __future__ import annotations

import logging

from tokenloom.scheduler.core.scheduler import Scheduler

log = logging.getLogger(__name__)
_MAX_NAMED = 20


def log_suspects(core: Scheduler) -> None:
    """Name the requests that are suspected now, the worst first, with the crashes that count against each."""
    suspects = core.suspects
    if not suspects:
        return
    worst_first = sorted(suspects, key=suspects.num_crashes, reverse=True)[:_MAX_NAMED]
    named = [f"{request.request_id} ({suspects.num_crashes(request)})" for request in worst_first]
    more = f" and {len(suspects) - _MAX_NAMED} more" if len(suspects) > _MAX_NAMED else ""
    log.warning(
        "%d requests may have killed the executor or failed its step, %d of them are tried in %d groups of their own; "
        "crashes of each: %s%s",
        len(suspects),
        len(suspects.isolated),
        len(suspects.groups),
        ", ".join(named),
        more,
    )
