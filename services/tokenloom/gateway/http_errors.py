"""The one place where errors become HTTP: statuses and bodies in OpenAI's form.

{"error": {"message": "...", "type": "invalid_request_error", "param": "n", "code": "invalid_value"}}
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tokenloom.common.errors import (
    Cancelled,
    DeadlineExceeded,
    FailedPrecondition,
    Internal,
    InvalidArgument,
    NotFound,
    PermissionDenied,
    ResourceExhausted,
    TokenloomError,
    Unauthenticated,
    Unavailable,
)

STATUS_OF: Mapping[type[TokenloomError], int] = {
    InvalidArgument: 400,
    FailedPrecondition: 400,
    Unauthenticated: 401,
    PermissionDenied: 403,
    NotFound: 404,
    ResourceExhausted: 429,
    Cancelled: 499,
    Internal: 500,
    Unavailable: 503,
    DeadlineExceeded: 504,
}
_TYPE_OF = {429: "rate_limit_error", 503: "service_unavailable_error", 504: "timeout_error"}
_DEFAULT_RETRY_AFTER_S = 1.0
# Names of the gRPC interface whose HTTP names differ.
_PARAM_OF = {
    "stop_strings": "stop",
    "include_stop_string": "include_stop_str_in_output",
    "num_choices": "n",
    "num_logprobs": "logprobs",
    "num_prompt_logprobs": "prompt_logprobs",
    "priority_class": "priority",
    "remaining_time_ms": "timeout",
    "template_kwargs_json": "chat_template_kwargs",
    "tools_json": "tools",
    "prompts": "prompt",
    "grammar": "response_format",
    "num_skipped_tokens": "last-event-id",
}
_GROUPS = ("chat", "complete", "options", "sampling", "stop")


@dataclass(eq=False)
class HttpError(Exception):
    """A refusal that only HTTP knows, such as a body that is too large."""

    status: int
    message: str
    param: str | None = None
    code: str | None = None
    headers: Mapping[str, str] | None = None


def status_of(error: TokenloomError) -> int:
    """The HTTP status of an error."""
    return STATUS_OF.get(type(error), 500)


def to_http(error: TokenloomError) -> HttpError:
    """The error as its HTTP caller sees it."""
    status = status_of(error)
    headers: dict[str, str] = {}
    if status in (429, 503):
        wait_s = _DEFAULT_RETRY_AFTER_S if error.retry_after_s is None else error.retry_after_s
        headers["retry-after"] = str(max(1, math.ceil(wait_s)))
    if status == 401:
        headers["www-authenticate"] = "Bearer"
    return HttpError(status, error.message, param_of(error.field), error.reason.lower() or None, headers)


def error_body(error: HttpError) -> dict[str, Any]:
    """The error in OpenAI's form."""
    default = "server_error" if error.status >= 500 else "invalid_request_error"
    kind = _TYPE_OF.get(error.status, default)
    return {"error": {"message": error.message, "type": kind, "param": error.param, "code": error.code}}


def param_of(field: str) -> str | None:
    """The HTTP name of a field of the gRPC interface, e.g. `options.sampling.top_p` is `top_p`."""
    if not field:
        return None
    parts = field.split(".")
    while len(parts) > 1 and parts[0] in _GROUPS:
        parts.pop(0)
    name, bracket, index = parts[0].partition("[")
    parts[0] = _PARAM_OF.get(name, name) + bracket + index
    if name == "prompts":
        return "prompt"
    return ".".join(parts)


def from_validation(errors: Sequence[Mapping[str, Any]]) -> HttpError:
    """The first validation error of a body.

    Args:
        errors: pydantic's errors.
    """
    first = errors[0]
    location, kind, context = first["loc"], str(first["type"]), first.get("ctx") or {}
    param = _param_path(location)
    if named := context.get("param"):
        param = f"{param}{named}" if named.startswith(".") else named
    if not param:
        return HttpError(400, "the body must be a JSON object", code="invalid_type")
    message = str(context.get("message") or first["msg"])
    return HttpError(400, f"{param}: {message}", param=param, code=context.get("code") or _code_of(kind))


def _param_path(location: Sequence[str | int]) -> str:
    """`("messages", 0, "content", "<parts>", 1, "type")` is `messages[0].content[1].type`."""
    path = ""
    for part in location:
        if isinstance(part, int):
            path += f"[{part}]"
        elif not part.startswith("<"):  # tags of unions
            path += f".{part}" if path else part
    return path


def _code_of(kind: str) -> str:
    if kind == "missing":
        return "missing_required_parameter"
    return "invalid_type" if kind.endswith(("_type", "_from_float")) else "invalid_value"
