"""Routes whose JSON bodies are read by orjson and refused in OpenAI's form."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any

import orjson
from fastapi.routing import APIRoute
from pydantic import BaseModel, ValidationError
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from tokenloom.common.errors import Cancelled
from tokenloom.gateway.field_types import MAX_NUM_PROMPT_IDS
from tokenloom.gateway.http_errors import HttpError, from_validation
from tokenloom.gateway.sized_work import MAX_LOOP_BYTES, run_sized

# The parser holds the interpreter until it is done, 50 to 150 ns for a value; a comma stands between two values. The
# most that any field takes is `MAX_NUM_PROMPT_IDS`.
_MAX_NUM_COMMAS = MAX_NUM_PROMPT_IDS + (1 << 16)
_BYTES_AT_ONCE = 1 << 20


class _ReadRequest(Request):
    """A request whose body was read and checked; FastAPI passes a checked model on as it is."""

    checked_body: BaseModel

    async def json(self) -> Any:
        return self.checked_body


class JsonRoute(APIRoute):
    """A route that takes a JSON body.

    The body is read and checked here, so that its limits are not mistaken for syntax errors and a large one does not
    hold the event loop. Its media type must be JSON: a web page of another origin can post plain text to a local server
    without asking, but not JSON.
    """

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """FastAPI's handler behind the checks."""
        handler = super().get_route_handler()
        assert self.body_field is not None
        model: type[BaseModel] = self.body_field.field_info.annotation  # type: ignore[assignment]

        async def checked(request: Request) -> Response:
            media_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
            if media_type != "application/json" and not media_type.endswith("+json"):
                raise HttpError(415, "send the body as `content-type: application/json`", code="unsupported_media_type")
            read = _ReadRequest(request.scope, request.receive)
            try:
                body = await read.body()
            except ClientDisconnect:
                raise Cancelled("the client went away", reason="CLIENT_DISCONNECTED") from None
            if not body:
                raise HttpError(400, "the body is empty; a JSON object is needed", code="invalid_json")
            read.checked_body = await run_sized(len(body) > MAX_LOOP_BYTES, lambda: read_body(model, body))
            return await handler(read)

        return checked


def _num_commas(body: bytes) -> int:
    return sum(body.count(b",", start, start + _BYTES_AT_ONCE) for start in range(0, len(body), _BYTES_AT_ONCE))


def read_body(model: type[BaseModel], body: bytes) -> BaseModel:
    """A body as the model of its route. Raises: HttpError that names the first fault."""
    if _num_commas(body) > _MAX_NUM_COMMAS:
        raise HttpError(413, "the body holds too many values", code="body_too_large")
    try:
        return model.model_validate(orjson.loads(body))
    except orjson.JSONDecodeError as error:
        raise HttpError(400, f"the body is not valid JSON: {error.msg}", code="invalid_json") from None
    except ValidationError as error:
        raise from_validation(error.errors(include_url=False, include_input=False)) from None
