"""gRPC channel arguments and the one function that makes client channels.

gRPC takes unknown channel arguments in silence, so a unit test compares the names here with those gRPC knows.
"""

from __future__ import annotations

import grpc

PUBLIC_MESSAGE_BYTES = 16 << 20
INTERNAL_MESSAGE_BYTES = 64 << 20
KEEPALIVE_TIME_MS = 20_000
KEEPALIVE_TIMEOUT_MS = 10_000
ChannelOptions = list[tuple[str, int | str]]


def message_options(max_message_bytes: int) -> ChannelOptions:
    """Limits of a message in both directions."""
    return [
        ("grpc.max_send_message_length", max_message_bytes),
        ("grpc.max_receive_message_length", max_message_bytes),
    ]


def client_options(max_message_bytes: int) -> ChannelOptions:
    """Arguments of every client channel: limits, keepalive, quick reconnects."""
    return [
        *message_options(max_message_bytes),
        ("grpc.keepalive_time_ms", KEEPALIVE_TIME_MS),
        ("grpc.keepalive_timeout_ms", KEEPALIVE_TIMEOUT_MS),
        ("grpc.http2.max_pings_without_data", 0),
        ("grpc.initial_reconnect_backoff_ms", 50),
        ("grpc.min_reconnect_backoff_ms", 1000),  # what each attempt may take; a busy machine needs more than 50
        ("grpc.max_reconnect_backoff_ms", 1000),
        ("grpc.use_local_subchannel_pool", 1),
    ]


def server_options(max_message_bytes: int) -> ChannelOptions:
    """Arguments of every server: limits, keepalive as the clients use it, no sharing of ports."""
    return [
        *message_options(max_message_bytes),
        ("grpc.keepalive_time_ms", KEEPALIVE_TIME_MS),
        ("grpc.keepalive_timeout_ms", KEEPALIVE_TIMEOUT_MS),
        ("grpc.http2.min_ping_interval_without_data_ms", KEEPALIVE_TIME_MS // 2),
        ("grpc.http2.max_ping_strikes", 0),
        ("grpc.so_reuseport", 0),
    ]


def bearer_metadata(token: str) -> tuple[tuple[str, str], ...]:
    """Call metadata with a key or the cluster credential; empty without one.

    Given to each call instead of an interceptor, because an interceptor passes every message of a stream through a
    queue of its own.
    """
    return (("authorization", f"Bearer {token}"),) if token else ()


def make_channel(address: str, *, max_message_bytes: int = INTERNAL_MESSAGE_BYTES) -> grpc.aio.Channel:
    """A channel to a stage; the only way to make one.

    Args:
        address: `unix:PATH` or `host:port`.
        max_message_bytes: limit in both directions; the peer's must be the same.
    """
    return grpc.aio.insecure_channel(address, options=client_options(max_message_bytes))
