"""All tokenizers that a gateway knows: the choice among them, and what happens when a session is lost.

A request whose client has seen nothing yet (every answer that is not streamed, and streams before their first text)
begins anew through the next session, with the same id and seed; one that the client has seen a part of fails. Going on
in mid-stream needs the generated ids of every choice, which would put a message per row into every frame.

A session that ended because something was too large for it would end again with the same request, and with it all its
neighbours. So large requests are not sent again then, and the others only once.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from functools import partial

from tokenloom.common.errors import (
    DeadlineExceeded,
    InvalidArgument,
    ResourceExhausted,
    TokenloomError,
    Unavailable,
)
from tokenloom.gateway import metrics
from tokenloom.gateway.convert import Start
from tokenloom.gateway.generation import Generation
from tokenloom.gateway.model_info import ModelInfo
from tokenloom.gateway.tokenizer_client import Call, TokenizerClient

log = logging.getLogger(__name__)
TIME_IS_UP = "the request's time was up"
TAKEOVER_WAIT_S = 10.0
MAX_ATTEMPTS = 4
# After a session that ended overfull.
MAX_ATTEMPTS_OVERFULL = 2
LARGE_START_BYTES = 1 << 20
# The tokenizer is the first to end a request whose time is up; this is for one that does not answer.
_DEADLINE_SLACK_S = 2.0


class TokenizerPool:
    """The tokenizers at some addresses.

    Args:
        addresses: at least one.
        cluster_token: credential between stages; empty: none.
        client_id: this gateway's name in the tokenizers' logs.
        max_num_requests: requests in flight; more are refused.
    """

    def __init__(self, addresses: Sequence[str], cluster_token: str, client_id: str, max_num_requests: int) -> None:
        self._clients = [
            TokenizerClient(address, cluster_token, client_id, self._take_back, self._submit_waiting)
            for address in addresses
        ]
        self._max_num_requests = max_num_requests
        self._open: dict[str, Generation] = {}
        self._deadlines: dict[str, asyncio.TimerHandle] = {}
        self._waiting: list[Call] = []
        self._is_closed = False
        self._is_idle = asyncio.Event()
        self._is_idle.set()

    @property
    def is_ready(self) -> bool:
        """A session is open with a tokenizer whose health says SERVING."""
        return any(client.is_up and client.is_serving and not client.is_draining for client in self._clients)

    @property
    def num_in_flight(self) -> int:
        """Requests that were submitted and have not been released."""
        return len(self._open)

    async def start(self) -> None:
        """Begin to connect; returns at once."""
        for client in self._clients:
            client.start()

    async def stop(self) -> None:
        """Close every session. Requests still open fail."""
        self.close()
        await asyncio.gather(*(client.stop() for client in self._clients))
        self.abandon_all(Unavailable("the gateway was stopped", reason="STOPPED"))

    def close(self) -> None:
        """Take no new requests."""
        self._is_closed = True

    def submit(self, generation: Generation, start: Start, timeout_s: float) -> None:
        """Start a request; `release` must follow.

        Args:
            timeout_s: time that is left for it.

        Raises: DeadlineExceeded if none is left; Unavailable if no tokenizer can be reached; ResourceExhausted at the
            bound of requests in flight.
        """
        late = DeadlineExceeded(TIME_IS_UP)
        if timeout_s <= 0:
            raise late
        if self._is_closed:
            raise Unavailable("the gateway is shutting down", reason="SHUTTING_DOWN")
        if len(self._open) >= self._max_num_requests:
            limit = self._max_num_requests
            raise ResourceExhausted(f"{limit} requests are in flight; try again later", retry_after_s=1.0)
        client = self._pick()
        loop = asyncio.get_running_loop()
        call = Call(generation, start, loop.time(), loop.time() + timeout_s)
        self._open[generation.request_id] = generation
        self._is_idle.clear()
        timer = loop.call_later(timeout_s + _DEADLINE_SLACK_S, generation.expire, late)
        self._deadlines[generation.request_id] = timer
        client.submit(call)

    def release(self, generation: Generation) -> None:
        """The handler is done with a request, which must be over."""
        assert generation.is_over
        self._open.pop(generation.request_id, None)
        if (timer := self._deadlines.pop(generation.request_id, None)) is not None:
            timer.cancel()
        if not self._open:
            self._is_idle.set()

    async def list_models(self, api_key: str) -> list[ModelInfo]:
        """The models served, for the caller with this key. Raises: TokenloomError."""
        return await self._pick().list_models(api_key)

    async def wait_idle(self) -> None:
        """Return when no request is in flight."""
        await self._is_idle.wait()

    def abandon_all(self, error: TokenloomError) -> None:
        """End every request in flight with `error`."""
        for generation in list(self._open.values()):
            generation.abandon(error)

    def _find(self) -> TokenizerClient | None:
        """The healthy tokenizer with the fewest requests in flight."""
        candidates = [client for client in self._clients if client.is_up and not client.is_draining]
        return min(candidates, key=lambda client: (not client.is_serving, client.num_in_flight), default=None)

    def _pick(self) -> TokenizerClient:
        client = self._find()
        if client is None:
            raise Unavailable("no tokenizer can be reached", reason="NO_TOKENIZER", retry_after_s=1.0)
        return client

    def _take_back(self, calls: list[Call], is_overfull: bool) -> None:
        """A session was lost: begin its requests anew where the client saw nothing, fail the others."""
        lost = Unavailable("the connection to the tokenizer was lost", reason="SESSION_LOST", retry_after_s=1.0)
        max_attempts = MAX_ATTEMPTS_OVERFULL if is_overfull else MAX_ATTEMPTS
        for call in calls:
            if is_overfull and call.start.ByteSize() > LARGE_START_BYTES:
                too_large = "the request was too large for the connection to the tokenizer; send less at once"
                call.generation.fail(InvalidArgument(too_large, reason="REQUEST_TOO_LARGE"))
            elif self._is_closed or not call.generation.is_restartable or call.num_attempts >= max_attempts:
                call.generation.fail(lost)
            else:
                call.generation.restart()
                call.generation.on_abandoned = partial(self._forget, call)
                self._wait_for_session(call, lost)
        self._submit_waiting()

    def _wait_for_session(self, call: Call, lost: TokenloomError) -> None:
        """Keep a call until another session is open, so long as that may take or the call's own time allows."""
        loop = asyncio.get_running_loop()
        end_s, error = loop.time() + TAKEOVER_WAIT_S, lost
        if call.deadline_s < end_s:  # there is no tokenizer to end it
            end_s, error = call.deadline_s, DeadlineExceeded(TIME_IS_UP)
        call.give_up = loop.call_at(end_s, self._give_up, call, error)
        self._waiting.append(call)

    def _submit_waiting(self) -> None:
        while self._waiting and (client := self._find()) is not None:
            call = self._waiting.pop(0)
            call.end_wait()
            if not call.generation.is_over:
                metrics.RESUBMISSIONS.inc()
                client.submit(call)

    def _forget(self, call: Call) -> None:
        call.end_wait()
        if call in self._waiting:
            self._waiting.remove(call)

    def _give_up(self, call: Call, error: TokenloomError) -> None:
        if call in self._waiting:
            self._waiting.remove(call)
            call.generation.fail(error)
