"""JSON responses through orjson."""

from __future__ import annotations

from typing import Any

import orjson
from starlette.responses import Response

from tokenloom.gateway.http_errors import HttpError, error_body


class JsonResponse(Response):
    """A JSON body."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        """The body's bytes."""
        return orjson.dumps(content)


def error_response(error: HttpError) -> JsonResponse:
    """An error in OpenAI's form."""
    return JsonResponse(error_body(error), error.status, dict(error.headers or {}))
