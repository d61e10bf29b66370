"""The one way to run a gRPC server: limits, keepalive, health, reflection, credentials and error mapping.

Servicers raise `TokenloomError`; anything else is logged with its traceback and becomes INTERNAL.
"""

from __future__ import annotations

import hmac
import logging
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, Any

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection
from grpc_status import rpc_status

from tokenloom.common.address import Address, check_port_free, parse_address, remove_stale_socket
from tokenloom.common.auth import bearer_of
from tokenloom.common.channel import INTERNAL_MESSAGE_BYTES, server_options
from tokenloom.common.errors import Internal, SetupError, TokenloomError, Unauthenticated, to_status

log = logging.getLogger(__name__)
if TYPE_CHECKING:
    Handler = grpc.RpcMethodHandler[Any, Any]  # generic in the stubs only
    Interceptor = grpc.aio.ServerInterceptor[Any, Any]
else:
    Handler, Interceptor = grpc.RpcMethodHandler, grpc.aio.ServerInterceptor
Service = tuple[Callable[[Any, grpc.aio.Server], None], Any, str]
_HEALTH = "/grpc.health.v1.Health/"


class GrpcServer:
    """A gRPC server with health ("" is liveness, a service's name is readiness) and reflection.

    Args:
        address: where to listen, `unix:PATH` (made with mode 0600) or `host:port`, several with commas between; port 0
            takes a free one.
        services: (add_X_to_server, servicer, full service name) of each service.
        cluster_token: credential that callers of every service must send; health is always open. Empty: none is asked
            for, and only Unix sockets and loopback addresses are listened at. None: the services ask for keys of
            their own.
        max_message_bytes: limit in both directions.
    """

    def __init__(
        self,
        address: str,
        services: Sequence[Service],
        *,
        cluster_token: str | None = None,
        max_message_bytes: int = INTERNAL_MESSAGE_BYTES,
    ) -> None:
        self._addresses = [parse_address(part.strip()) for part in address.split(",")]
        self._names = [name for _, _, name in services]
        self._is_unguarded = cluster_token == ""
        self._health = health.aio.HealthServicer()  # type: ignore[attr-defined]
        interceptors: list[Interceptor] = [ErrorInterceptor()]
        if cluster_token:
            interceptors.append(CredentialInterceptor(cluster_token))
        self._server = grpc.aio.server(interceptors=interceptors, options=server_options(max_message_bytes))
        for add, servicer, _ in services:
            add(servicer, self._server)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        reflection.enable_server_reflection([*self._names, health.SERVICE_NAME, reflection.SERVICE_NAME], self._server)
        self.port = 0  # of the TCP address, once started

    async def start(self) -> None:
        """Listen. Live at once, ready only after `set_serving(True)`.

        Raises: SetupError if the address is taken or not ours to take.
        """
        for address in self._addresses:
            if self._is_unguarded and not address.is_local:
                raise SetupError(
                    f"{address} can be reached from outside: set --cluster-token, or listen at 127.0.0.1 or unix:PATH"
                )
            self._bind(address)
        await self._health.set("", health_pb2.HealthCheckResponse.SERVING)
        await self.set_serving(False)
        await self._server.start()

    def _bind(self, address: Address) -> None:
        remove_stale_socket(address)
        check_port_free(address)
        old_mask = os.umask(0o177) if address.is_unix else None
        try:
            port = self._server.add_insecure_port(str(address))
        except RuntimeError as error:
            raise SetupError(f"cannot listen on {address}: {error}") from None
        finally:
            if old_mask is not None:
                os.umask(old_mask)
        self.port = self.port if address.is_unix else port

    async def set_serving(self, is_serving: bool) -> None:
        """Set the readiness of every service."""
        status = health_pb2.HealthCheckResponse.SERVING if is_serving else health_pb2.HealthCheckResponse.NOT_SERVING
        for name in self._names:
            await self._health.set(name, status)

    async def set_live(self, is_live: bool) -> None:
        """Set the liveness; live at the start."""
        status = health_pb2.HealthCheckResponse.SERVING if is_live else health_pb2.HealthCheckResponse.NOT_SERVING
        await self._health.set("", status)

    async def stop(self, grace_s: float) -> None:
        """Refuse new calls, give running ones `grace_s` seconds, then end them."""
        await self._health.enter_graceful_shutdown()
        await self._server.stop(grace_s)


class CredentialInterceptor(Interceptor):
    """Refuses calls without the cluster credential, health checks excepted."""

    def __init__(self, token: str) -> None:
        self._token = token.encode()

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Handler]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Handler:
        """Pass the call on, or answer UNAUTHENTICATED."""
        handler = await continuation(handler_call_details)
        if handler is None or handler_call_details.method.startswith(_HEALTH):
            return handler
        sent = dict(handler_call_details.invocation_metadata or ()).get("authorization")
        key = bearer_of(sent.decode() if isinstance(sent, bytes) else sent)
        if hmac.compare_digest(key.encode(), self._token):
            return handler
        refusal = Unauthenticated("the cluster credential is missing or wrong", reason="INVALID_CLUSTER_TOKEN")
        return _replaced(handler, lambda *_: _raise(refusal), lambda *_: _raise_in_stream(refusal))


class ErrorInterceptor(Interceptor):
    """Turns exceptions of servicers into statuses."""

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Handler]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Handler:
        """Wrap the method's handler."""
        handler = await continuation(handler_call_details)
        method = handler_call_details.method
        if handler is None or method.startswith(_HEALTH):
            return handler
        behaviour: Any = handler.stream_stream or handler.stream_unary or handler.unary_stream or handler.unary_unary

        async def unary(request: Any, context: Any) -> Any:
            try:
                return await behaviour(request, context)
            except Exception as error:
                await _abort(context, method, error)

        async def stream(request: Any, context: Any) -> AsyncIterator[Any]:
            try:
                async for response in behaviour(request, context):
                    yield response
            except Exception as error:
                await _abort(context, method, error)

        return _replaced(handler, unary, stream)


async def _abort(context: Any, method: str, error: Exception) -> None:
    if isinstance(error, grpc.aio.AbortError):
        raise error
    if not isinstance(error, TokenloomError):
        log.error("unexpected error in %s", method, exc_info=error)
        error = Internal("internal error; the server's log has the details")
    status = rpc_status.to_status(to_status(error))
    await context.abort(status.code, status.details, status.trailing_metadata)


async def _raise(error: TokenloomError) -> Any:
    raise error


async def _raise_in_stream(error: TokenloomError) -> AsyncIterator[Any]:
    raise error
    yield


def _replaced(handler: Handler, unary: Callable[..., Any], stream: Callable[..., Any]) -> Handler:
    """A handler of the same kind and serializers with another behaviour."""
    make: Callable[..., Handler]
    if handler.request_streaming:
        make = (
            grpc.stream_stream_rpc_method_handler
            if handler.response_streaming
            else grpc.stream_unary_rpc_method_handler
        )
    else:
        make = (
            grpc.unary_stream_rpc_method_handler if handler.response_streaming else grpc.unary_unary_rpc_method_handler
        )
    return make(
        stream if handler.response_streaming else unary,
        request_deserializer=handler.request_deserializer,
        response_serializer=handler.response_serializer,
    )
