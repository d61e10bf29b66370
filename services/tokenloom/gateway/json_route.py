"""Routes whose JSON bodies are read by orjson and refused in OpenAI's form."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any

import orjson
from fastapi.routing import APIRoute
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from tokenloom.common.errors import Cancelled
from tokenloom.gateway.http_errors import HttpError


class _JsonRequest(Request):
    async def json(self) -> Any:
        """The body. Raises: json.JSONDecodeError, which FastAPI turns into a RequestValidationError."""
        return orjson.loads(await self.body())


class JsonRoute(APIRoute):
    """A route that takes a JSON body.

    The body is read here, so that its limits are not mistaken for syntax errors. Its media type must be JSON: a web
    page of another origin can post plain text to a local server without asking, but not JSON.
    """

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """FastAPI's handler behind the checks."""
        handler = super().get_route_handler()

        async def checked(request: Request) -> Response:
            media_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
            if media_type != "application/json" and not media_type.endswith("+json"):
                raise HttpError(415, "send the body as `content-type: application/json`", code="unsupported_media_type")
            json_request = _JsonRequest(request.scope, request.receive)
            try:
                body = await json_request.body()
            except ClientDisconnect:
                raise Cancelled("the client went away", reason="CLIENT_DISCONNECTED") from None
            if not body:
                raise HttpError(400, "the body is empty; a JSON object is needed", code="invalid_json")
            return await handler(json_request)

        return checked
