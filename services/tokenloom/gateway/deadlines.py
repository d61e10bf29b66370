"""How long a request may take: the smallest of what its body, its header and this gateway say."""

from __future__ import annotations

import re
from typing import Any

from starlette.datastructures import Headers

from tokenloom.gateway.field_types import MAX_TIMEOUT_S
from tokenloom.gateway.http_errors import HttpError

TIMEOUT_HEADER = "x-request-timeout"
HEADER_DOCUMENT: dict[str, Any] = {
    "name": TIMEOUT_HEADER,
    "in": "header",
    "required": False,
    "description": "Seconds that the request may take; the smaller of it and the body's `timeout` holds.",
    "schema": {"type": "number", "exclusiveMinimum": 0, "maximum": MAX_TIMEOUT_S},
}
"""The header as the OpenAPI document describes it."""
_SECONDS = re.compile(r"\d{1,9}(\.\d{0,9})?|\.\d{1,9}", re.ASCII)


def time_limit_s(headers: Headers, body_s: float | None, longest_s: float) -> float:
    """Seconds from the request's head to its deadline.

    Args:
        body_s: the body's `timeout`.
        longest_s: the gateway's own limit.

    Raises: HttpError, 400 and naming the header, if that is no time.
    """
    limits_s = [longest_s, *map(_seconds, headers.getlist(TIMEOUT_HEADER))]
    return min(limits_s if body_s is None else [*limits_s, body_s])


def _seconds(text: str) -> float:
    """A header's value."""
    value = float(text) if _SECONDS.fullmatch(text.strip()) else 0.0
    if not 0 < value <= MAX_TIMEOUT_S:
        message = f"must be a number of seconds above 0, at most {MAX_TIMEOUT_S}, such as 2.5"
        raise HttpError(400, f"{TIMEOUT_HEADER}: {message}", param=TIMEOUT_HEADER, code="invalid_value")
    return value
