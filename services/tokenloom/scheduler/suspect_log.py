"""Log lines on requests that may have killed the executor."""

from __future__ import annotations

import logging

from tokenloom.scheduler.core.scheduler import Scheduler

log = logging.getLogger(__name__)
_MAX_NAMED = 20


def log_suspects(core: Scheduler) -> None:
    """Name the requests that are suspected now, the worst first, with the crashes and failed steps of each."""
    suspects = core.suspects
    if not suspects:
        return
    counts = {request: known.num_times for request in suspects if (known := suspects.suspicion(request)) is not None}
    worst_first = sorted(counts, key=lambda request: counts[request], reverse=True)[:_MAX_NAMED]
    named = [f"{request.request_id} ({counts[request]})" for request in worst_first]
    more = f" and {len(suspects) - _MAX_NAMED} more" if len(suspects) > _MAX_NAMED else ""
    log.warning(
        "%d requests may have killed the executor or failed its step, %d of them are tried in %d groups of their own; "
        "how often each: %s%s",
        len(suspects),
        len(suspects.isolated),
        len(suspects.groups),
        ", ".join(named),
        more,
    )
