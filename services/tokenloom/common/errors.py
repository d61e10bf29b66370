"""Errors that callers are told about, each with its gRPC status.

    Exception
    ├── SetupError                  a stage cannot start: one line for the operator, exit code 2
    └── TokenloomError              a request failed
        ├── InvalidArgument         INVALID_ARGUMENT     400   the request is wrong; `field` says where
        ├── Unauthenticated         UNAUTHENTICATED      401   no key, or an unknown one
        ├── PermissionDenied        PERMISSION_DENIED    403   the key may not do this
        ├── NotFound                NOT_FOUND            404   no such model or request
        ├── FailedPrecondition      FAILED_PRECONDITION  400   peers do not fit together
        ├── ResourceExhausted       RESOURCE_EXHAUSTED   429   a bound is reached; `retry_after_s`
        ├── Cancelled               CANCELLED            499   the caller went away
        ├── Unavailable             UNAVAILABLE          503   not now; `retry_after_s`
        ├── DeadlineExceeded        DEADLINE_EXCEEDED    504   the request's time was up
        └── Internal                INTERNAL             500   a fault of ours

Servicers raise these; an interceptor (grpc_server.py) turns them into a status with google.rpc details. Inside streams
they travel as `common_pb2.Error`.
"""

from __future__ import annotations

from typing import ClassVar

import grpc
from google.protobuf.duration_pb2 import Duration
from google.rpc import code_pb2, error_details_pb2, status_pb2
from grpc_status import rpc_status

from tokenloom.api.v1 import common_pb2

ERROR_DOMAIN = "tokenloom"


class SetupError(Exception):
    """A stage cannot start. The message is one line that says what to do."""


class TokenloomError(Exception):
    """A request failed.

    Args:
        message: for people, in the caller's terms.
        field: the request field at fault, in the caller's spelling.
        reason: for programs, UPPER_SNAKE_CASE; default: the status' name.
        retry_after_s: seconds after which trying again may help; None if it does not help.
    """

    code: ClassVar[grpc.StatusCode] = grpc.StatusCode.INTERNAL

    def __init__(self, message: str, *, field: str = "", reason: str = "", retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.field = field
        self.reason = reason or self.code.name
        self.retry_after_s = retry_after_s


class InvalidArgument(TokenloomError):
    """The request is wrong; `field` says where."""

    code = grpc.StatusCode.INVALID_ARGUMENT


class Unauthenticated(TokenloomError):
    """No key, or an unknown one."""

    code = grpc.StatusCode.UNAUTHENTICATED


class PermissionDenied(TokenloomError):
    """The key may not do this."""

    code = grpc.StatusCode.PERMISSION_DENIED


class NotFound(TokenloomError):
    """No such model or request."""

    code = grpc.StatusCode.NOT_FOUND


class FailedPrecondition(TokenloomError):
    """Peers do not fit together: another model, schema or epoch."""

    code = grpc.StatusCode.FAILED_PRECONDITION


class ResourceExhausted(TokenloomError):
    """A bound is reached."""

    code = grpc.StatusCode.RESOURCE_EXHAUSTED


class Cancelled(TokenloomError):
    """The caller went away."""

    code = grpc.StatusCode.CANCELLED


class Unavailable(TokenloomError):
    """Not now."""

    code = grpc.StatusCode.UNAVAILABLE


class DeadlineExceeded(TokenloomError):
    """The request's time was up."""

    code = grpc.StatusCode.DEADLINE_EXCEEDED


class Internal(TokenloomError):
    """A fault of ours."""

    code = grpc.StatusCode.INTERNAL


_BY_CODE: dict[int, type[TokenloomError]] = {
    cls.code.value[0]: cls
    for cls in (
        InvalidArgument,
        Unauthenticated,
        PermissionDenied,
        NotFound,
        FailedPrecondition,
        ResourceExhausted,
        Cancelled,
        Unavailable,
        DeadlineExceeded,
        Internal,
    )
}
_BY_CODE[code_pb2.OUT_OF_RANGE] = InvalidArgument


def to_proto(error: TokenloomError) -> common_pb2.Error:
    """The error as it travels inside a stream."""
    proto = common_pb2.Error(
        code=error.code.value[0],
        message=error.message,
        reason=error.reason,
        field=error.field,
    )
    if error.retry_after_s is not None:
        proto.retry_after_ms = round(error.retry_after_s * 1000)
    return proto


def from_proto(proto: common_pb2.Error) -> TokenloomError:
    """The error that `to_proto` sent; an unknown code becomes Internal."""
    retry_after_s = proto.retry_after_ms / 1000 if proto.HasField("retry_after_ms") else None
    cls = _BY_CODE.get(proto.code, Internal)
    return cls(proto.message, field=proto.field, reason=proto.reason, retry_after_s=retry_after_s)


def to_status(error: TokenloomError) -> status_pb2.Status:
    """google.rpc.Status with ErrorInfo, BadRequest (if a field is at fault) and RetryInfo (if trying again helps)."""
    status = status_pb2.Status(code=error.code.value[0], message=error.message)
    status.details.add().Pack(error_details_pb2.ErrorInfo(reason=error.reason, domain=ERROR_DOMAIN))
    if error.field:
        violation = error_details_pb2.BadRequest.FieldViolation(field=error.field, description=error.message)
        status.details.add().Pack(error_details_pb2.BadRequest(field_violations=[violation]))
    if error.retry_after_s is not None:
        delay = Duration()
        delay.FromMilliseconds(round(error.retry_after_s * 1000))
        status.details.add().Pack(error_details_pb2.RetryInfo(retry_delay=delay))
    return status


def from_rpc_error(error: grpc.aio.AioRpcError) -> TokenloomError:
    """The TokenloomError that a peer's interceptor sent, or the nearest one for a status that gRPC itself made."""
    cls = _BY_CODE.get(error.code().value[0], Internal)
    field, reason, retry_after_s = "", "", None
    status = rpc_status.from_call(error)  # type: ignore[arg-type]
    for detail in status.details if status is not None else ():
        for kind in (error_details_pb2.ErrorInfo, error_details_pb2.BadRequest, error_details_pb2.RetryInfo):
            message = kind()
            if not detail.Unpack(message):
                continue
            if isinstance(message, error_details_pb2.ErrorInfo):
                reason = message.reason
            elif isinstance(message, error_details_pb2.BadRequest) and message.field_violations:
                field = message.field_violations[0].field
            elif isinstance(message, error_details_pb2.RetryInfo):
                retry_after_s = message.retry_delay.ToMilliseconds() / 1000
    return cls(error.details() or error.code().name, field=field, reason=reason, retry_after_s=retry_after_s)
