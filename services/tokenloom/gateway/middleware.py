"""What happens around every HTTP request, outermost first: telemetry, drain, keys, the body's limits.

Plain ASGI, since these run for each message of each stream.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Callable

from opentelemetry import trace
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tokenloom.common.auth import ApiKeys, bearer_of, digest_of
from tokenloom.common.errors import Internal, ResourceExhausted, TokenloomError, Unavailable
from tokenloom.common.telemetry import extract_headers, tracer
from tokenloom.gateway import metrics
from tokenloom.gateway.http_errors import HttpError, status_of, to_http
from tokenloom.gateway.json_response import error_response
from tokenloom.gateway.request_info import RequestInfo, attach, info_of, new_hex_id

log = logging.getLogger(__name__)
# Probes, metrics and documentation: no key, served during a drain, not traced.
OPEN_PATHS = frozenset({"/health", "/ready", "/metrics", "/openapi.json", "/docs"})
_REQUEST_ID = re.compile(r"[\x21-\x7e]{1,128}")


class Telemetry:
    """Request id, span, metrics and access log of every request; turns unexpected exceptions into 500."""

    def __init__(self, app: ASGIApp, routes: frozenset[str]) -> None:
        self._app = app
        self._routes = routes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        info = RequestInfo(hex_id=(hex_id := new_hex_id()), public_id=hex_id, span=_start_span(scope, headers))
        if _REQUEST_ID.fullmatch(own := headers.get("x-request-id", "")):
            info.public_id = own
        info.route = _route_of(scope["path"], self._routes)
        attach(scope, info)
        metrics.IN_FLIGHT.labels(info.route).inc()
        try:
            await self._answer(scope, receive, send, info)
        finally:
            metrics.IN_FLIGHT.labels(info.route).dec()
            _finish(scope, info)

    async def _answer(self, scope: Scope, receive: Receive, send: Send, info: RequestInfo) -> None:
        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                info.status = message["status"]
                message["headers"] = [*message.get("headers", ()), (b"x-request-id", info.public_id.encode())]
            await send(message)

        try:
            await self._app(scope, receive, send_with_id)
        except Exception:
            log.exception("unexpected error", extra={"request_id": info.hex_id})
            info.error = Internal("internal error; the server's log has the details")
            if info.status:  # cut the answer short: its end would look like success
                raise
            await error_response(to_http(info.error))(scope, receive, send_with_id)


def _route_of(path: str, routes: frozenset[str]) -> str:
    """A label of few values: the path if it is a route, else the collection it is in."""
    if path in routes:
        return path
    return "/v1/models/{id}" if path.startswith("/v1/models/") else "unknown"


def _start_span(scope: Scope, headers: Headers) -> trace.Span:
    if scope["path"] in OPEN_PATHS:
        return trace.INVALID_SPAN
    attributes = {"http.request.method": scope["method"], "url.path": scope["path"], "url.scheme": scope["scheme"]}
    return tracer().start_span(
        f"{scope['method']} {scope['path']}",
        context=extract_headers(headers),
        kind=trace.SpanKind.SERVER,
        attributes=attributes,
    )


def _finish(scope: Scope, info: RequestInfo) -> None:
    status = info.status or 499
    if info.error is not None:  # what really happened, also behind a 200 that had begun
        status = status_of(info.error)
    metrics.REQUESTS.labels(info.route, str(status)).inc()
    metrics.DURATION.labels(info.route).observe(info.elapsed_s())
    info.span.set_attribute("http.response.status_code", info.status or status)
    info.span.set_attribute("http.route", info.route)
    if info.error is not None:
        info.span.set_attribute("error.type", info.error.reason.lower())
    if status >= 500:
        info.span.set_status(trace.StatusCode.ERROR)
    info.span.end()
    level = logging.DEBUG if scope["path"] in OPEN_PATHS else logging.INFO
    extra = {"request_id": info.hex_id, "status": status, "ms": round(info.elapsed_s() * 1000, 1)}
    if info.public_id != info.hex_id:
        extra["client_request_id"] = info.public_id
    if info.first_token_s is not None:
        extra["first_token_ms"] = round(info.first_token_s * 1000, 1)
    if info.error is not None:
        extra["error"] = info.error.reason
    log.log(level, "%s %s", scope["method"], info.route, extra=extra)


class DrainGate:
    """Refuses new requests while the gateway drains, and asks clients to bring no more on their connections."""

    def __init__(self, app: ASGIApp, is_draining: Callable[[], bool]) -> None:
        self._app = app
        self._is_draining = is_draining

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def send_last(message: Message) -> None:
            if message["type"] == "http.response.start" and self._is_draining():
                message["headers"] = [*message.get("headers", ()), (b"connection", b"close")]
            await send(message)

        if self._is_draining() and scope["path"] not in OPEN_PATHS:
            refusal = Unavailable("the gateway is shutting down", reason="SHUTTING_DOWN")
            info_of(scope).error = refusal
            await error_response(to_http(refusal))(scope, receive, send_last)
            return
        await self._app(scope, receive, send_last)


class KeyGate:
    """Checks the caller's key before its body is read, and notes the key's digest for the tokenizer."""

    def __init__(self, app: ASGIApp, keys: ApiKeys) -> None:
        self._app = app
        self._keys = keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one request."""
        if scope["type"] == "http" and scope["path"] not in OPEN_PATHS:
            key = bearer_of(Headers(scope=scope).get("authorization"))
            digest = digest_of(key) if key else b""
            info_of(scope).key_digest = digest
            try:
                self._keys.check(digest)
            except TokenloomError as refusal:
                await error_response(to_http(refusal))(scope, receive, send)
                return
        await self._app(scope, receive, send)


class BodyLimit:
    """Refuses bodies that are too large, by their Content-Length or by counting, and bodies that do not arrive.

    What a body takes stays counted until its request is answered, and all of them together have a bound too.
    """

    def __init__(self, app: ASGIApp, max_bytes: int, max_total_bytes: int, timeout_s: float) -> None:
        self._app = app
        self._max_bytes = max_bytes
        self._max_total_bytes = max_total_bytes
        self._num_total_bytes = 0
        self._timeout_s = timeout_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        declared = Headers(scope=scope).get("content-length", "")
        if declared.isdecimal() and int(declared) > self._max_bytes:
            await error_response(self._too_large())(scope, receive, send)
            return
        deadline_s = asyncio.get_running_loop().time() + self._timeout_s
        num_bytes, is_whole = 0, False

        async def counted() -> Message:
            nonlocal num_bytes, is_whole
            if is_whole:
                return await receive()
            try:
                async with asyncio.timeout_at(deadline_s):
                    message = await receive()
            except TimeoutError:
                message_text = f"the body did not arrive within {self._timeout_s:g} s"
                raise HttpError(408, message_text, code="body_timeout", headers={"connection": "close"}) from None
            num_bytes += (num_new := len(message.get("body", b"")))
            self._num_total_bytes += num_new
            if num_bytes > self._max_bytes:
                raise self._too_large()
            if self._num_total_bytes > self._max_total_bytes:
                raise to_http(ResourceExhausted("too many bytes of requests are in flight; try again later"))
            is_whole = not message.get("more_body", False)
            return message

        try:
            await self._app(scope, counted, send)
        finally:
            self._num_total_bytes -= num_bytes

    def _too_large(self) -> HttpError:
        return HttpError(413, f"the body is larger than {self._max_bytes} bytes", code="body_too_large")
