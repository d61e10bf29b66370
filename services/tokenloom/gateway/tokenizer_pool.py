"""All tokenizers that a gateway knows: the choice among them, and what happens when a session is lost.

A request whose session was lost goes on through another one, behind the tokens that were taken of it: at once if there
is a tokenizer that is healthy or only waits for its engine, else as soon as one is. The engine keeps what runs for a
while (takeover_s, 10 s), so it is not computed again if that is soon. New requests wait too, for as long as the last
tokenizer may be on its way back; the time of a drain, in which it runs what it has and takes nothing new, does not
count. A tokenizer whose engine is away keeps requests itself.

A session that ended because something was too large for it would end again with the same request, and with it all its
neighbours. So large requests are not sent again then, and others only once unless they went on. The like holds for a
request that kills its tokenizer: it has a few attempts without a new token.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import math
from collections.abc import Iterable, Sequence
from functools import partial

from tokenloom.common.errors import (
    DeadlineExceeded,
    InvalidArgument,
    ResourceExhausted,
    TokenloomError,
    Unavailable,
)
from tokenloom.common.silence import STALL_TIMEOUT_S
from tokenloom.gateway import metrics
from tokenloom.gateway.convert import Start, resumed
from tokenloom.gateway.generation import Generation
from tokenloom.gateway.model_info import ModelInfo
from tokenloom.gateway.tokenizer_client import MAX_START_BYTES, Call, TokenizerClient

log = logging.getLogger(__name__)
TIME_IS_UP = "the request's time was up"
MAX_ATTEMPTS = 6
# After a session that ended overfull.
MAX_ATTEMPTS_OVERFULL = 2
LARGE_START_BYTES = 1 << 20
_SENT_AT_ONCE = 16
SWEEP_S = 1.0
# A tokenizer that is there when the gateway starts is connected by then.
_FIRST_CONNECT_S = 2.0
# So long does an engine keep what a lost tokenizer ran (its default).
_ENGINE_KEEPS_S = 10.0
_CANCEL_AFTER_S = 0.05
# The tokenizer is the first to end a request whose time is up; this is for one that does not answer.
_DEADLINE_SLACK_S = 2.0


class TokenizerPool:
    """The tokenizers at some addresses.

    Args:
        addresses: at least one.
        cluster_token: credential between stages; empty: none.
        client_id: this gateway's name in the tokenizers' logs.
        max_num_requests: requests in flight; more are refused.
        takeover_limit_s: how long requests wait for a tokenizer when none is left.
        max_total_buffered_bytes: text that may wait for all clients together.
        stall_timeout_s: how long a tokenizer may be silent.
    """

    def __init__(
        self,
        addresses: Sequence[str],
        cluster_token: str,
        client_id: str,
        max_num_requests: int,
        *,
        takeover_limit_s: float = 30.0,
        max_total_buffered_bytes: int = 256 << 20,
        stall_timeout_s: float = STALL_TIMEOUT_S,
    ) -> None:
        self._clients = [
            TokenizerClient(address, cluster_token, client_id, self._take_back, self._submit_waiting, stall_timeout_s)
            for address in addresses
        ]
        for client in self._clients:
            client.has_other = partial(self._has_other, client)
        self._max_num_requests = max_num_requests
        self._max_total_buffered_bytes = max_total_buffered_bytes
        self._sweep_timer: asyncio.TimerHandle | None = None
        self._open: set[Generation] = set()
        self._deadlines: dict[Generation, asyncio.TimerHandle] = {}
        self._takeover_limit_s = takeover_limit_s
        self._waiting: dict[Generation, Call] = {}
        self._left: list[tuple[float, Call]] = []
        self._is_sending = False
        self._lost_at_s = -math.inf
        self._connects_until_s = -math.inf
        self._is_closed = False
        self._is_stopped = False
        self._is_idle = asyncio.Event()
        self._is_idle.set()

    @property
    def is_ready(self) -> bool:
        """A session is open with a tokenizer whose health says SERVING."""
        return self._has_other(None)

    def _has_other(self, than: TokenizerClient | None) -> bool:
        return any(
            client.is_up and client.is_serving and not client.is_draining and client is not than
            for client in self._clients
        )

    @property
    def waits_for(self) -> str:
        """The stage that is missing, or hangs, while the gateway is not ready."""
        up = [client for client in self._clients if client.is_up]
        if any(client.waits_for_executor for client in up):
            return "executor"
        return "scheduler" if up else "tokenizer"

    @property
    def num_in_flight(self) -> int:
        """Requests that were submitted and have not been released."""
        return len(self._open)

    async def start(self) -> None:
        """Begin to connect; returns at once."""
        self._connects_until_s = asyncio.get_running_loop().time() + _FIRST_CONNECT_S
        for client in self._clients:
            client.start()

    async def stop(self) -> None:
        """Close every session. Requests still open fail."""
        self.close()
        self._is_stopped = True
        await asyncio.gather(*(client.stop() for client in self._clients))
        self.abandon_all(Unavailable("the gateway was stopped", reason="STOPPED"))

    def close(self) -> None:
        """Take no new requests."""
        self._is_closed = True

    def submit(self, generation: Generation, start: Start, timeout_s: float) -> None:
        """Start a request; `release` must follow.

        Args:
            timeout_s: time that is left for it.

        Raises: DeadlineExceeded if none is left; Unavailable if no tokenizer can be reached, nor could not long ago;
            ResourceExhausted at the bound of requests in flight.
        """
        late = DeadlineExceeded(TIME_IS_UP)
        if timeout_s <= 0:
            raise late
        if self._is_closed:
            raise Unavailable("the gateway is shutting down", reason="SHUTTING_DOWN")
        if len(self._open) >= self._max_num_requests:
            limit = self._max_num_requests
            raise ResourceExhausted(f"{limit} requests are in flight; try again later", retry_after_s=1.0)
        loop = asyncio.get_running_loop()
        wait_until_s = max(self._lost_at_s, self._left_at_s) + self._takeover_limit_s
        wait_s = max(wait_until_s, self._connects_until_s) - loop.time()
        client = self._find_healthy() or self._find_keeping()
        if client is None and wait_s <= 0 and (client := self._find_any()) is None:
            raise _unreachable()
        call = Call(generation, start, loop.time(), loop.time() + timeout_s)
        self._open.add(generation)
        self._is_idle.clear()
        if self._sweep_timer is None:
            self._sweep_timer = loop.call_later(SWEEP_S, self._sweep)
        timer = loop.call_later(timeout_s + _DEADLINE_SLACK_S, generation.expire, late)
        self._deadlines[generation] = timer
        if client is None:
            self._wait_for_session(call, wait_s, _unreachable())
        else:
            client.submit(call)

    def release(self, generation: Generation) -> None:
        """The handler is done with a request, which must be over."""
        assert generation.is_over
        self._open.discard(generation)
        if (timer := self._deadlines.pop(generation, None)) is not None:
            timer.cancel()
        if not self._open:
            self._is_idle.set()
            if self._sweep_timer is not None:
                self._sweep_timer.cancel()
                self._sweep_timer = None

    def _sweep(self) -> None:
        """Give those up for whom most waits, while more waits for all than may."""
        self._sweep_timer = asyncio.get_running_loop().call_later(SWEEP_S, self._sweep)
        total = sum(generation.num_held_bytes for generation in self._open)
        if total <= self._max_total_buffered_bytes:
            return
        for generation in sorted(self._open, key=lambda one: one.num_held_bytes, reverse=True):
            total -= generation.num_held_bytes
            generation.give_up_slow_reader("too much waits for slow clients, and most of it for this one")
            if total <= self._max_total_buffered_bytes:
                return

    async def list_models(self, api_key: str) -> list[ModelInfo]:
        """The models served, for the caller with this key. Raises: TokenloomError."""
        client = self._find_healthy() or self._find_any()
        if client is None:
            raise _unreachable()
        return await client.list_models(api_key)

    async def wait_idle(self) -> None:
        """Return when no request is in flight."""
        await self._is_idle.wait()

    def abandon_all(self, error: TokenloomError) -> None:
        """End every request in flight with `error`."""
        for generation in list(self._open):
            generation.abandon(error)

    def _find_healthy(self) -> TokenizerClient | None:
        """The healthy tokenizer with the fewest choices in flight."""
        return _least_busy(client for client in self._clients if client.is_serving)

    def _find_keeping(self) -> TokenizerClient | None:
        """One whose engine is away for a while, or waits for its executor: requests wait there as well as here."""
        waiting = _least_busy(client for client in self._clients if client.waits_for_executor)
        return waiting or _least_busy(client for client in self._clients if client.has_served)

    def _find_any(self) -> TokenizerClient | None:
        """One that is there, whatever it answers."""
        return _least_busy(self._clients)

    @property
    def _left_at_s(self) -> float:
        """When a tokenizer that stops left, or is about to leave."""
        if any(client.is_up and client.is_draining for client in self._clients):
            return asyncio.get_running_loop().time()
        return max(client.left_at_s for client in self._clients)

    def _take_back(self, calls: list[Call], is_overfull: bool) -> None:
        """A session was lost, or a tokenizer gave requests back: let them go on through another one."""
        self._lost_at_s = asyncio.get_running_loop().time()
        lost = Unavailable("the connection to the tokenizer was lost", reason="SESSION_LOST", retry_after_s=1.0)
        max_attempts = MAX_ATTEMPTS_OVERFULL if is_overfull else MAX_ATTEMPTS
        for call in calls:
            generation = call.generation
            call.note_progress()
            if generation.is_over:
                continue
            if is_overfull and call.start.ByteSize() > LARGE_START_BYTES:
                too_large = "the request was too large for the connection to the tokenizer; send less at once"
                generation.fail(InvalidArgument(too_large, reason="REQUEST_TOO_LARGE"))
            elif self._is_stopped or not generation.can_go_on or call.num_attempts >= max_attempts:
                generation.fail(lost)
            else:
                generation.progress.resume()
                self._wait_for_session(call, self._takeover_limit_s, lost)
        self._submit_waiting()

    def _wait_for_session(self, call: Call, limit_s: float, lost: TokenloomError) -> None:
        """Keep a call until a tokenizer takes it, for `limit_s` seconds or what the call's own time allows."""
        loop = asyncio.get_running_loop()
        end_s, error = loop.time() + limit_s, lost
        if call.deadline_s < end_s:  # there is no tokenizer to end it
            end_s, error = call.deadline_s, DeadlineExceeded(TIME_IS_UP)
        call.give_up = loop.call_at(end_s, self._give_up, call, error)
        call.generation.on_abandoned = partial(self._forget, call)
        self._waiting[call.generation] = call

    def _submit_waiting(self) -> None:
        """Send what waits, a few calls at a time: streams of others go on in between."""
        if not self._is_sending:
            self._send_some()

    def _send_some(self) -> None:
        self._is_sending = False
        for generation in list(itertools.islice(self._waiting, _SENT_AT_ONCE)):
            client = self._find_healthy() or self._find_keeping()
            if client is None:
                return
            call = self._waiting.pop(generation)
            call.end_wait()
            self._send_again(call, client)
        if self._left and (client := self._find_healthy()) is not None:
            self._cancel_left(client)
        if self._waiting:
            self._is_sending = True
            asyncio.get_running_loop().call_soon(self._send_some)

    @staticmethod
    def _send_again(call: Call, client: TokenizerClient) -> None:
        if call.is_sent:
            metrics.RESUBMISSIONS.inc()
            call.start = resumed(call.start, call.generation.progress)
            if call.start.ByteSize() > MAX_START_BYTES:
                call.generation.fail(Unavailable("the request has grown too large to go on", reason="SESSION_LOST"))
                return
        client.submit(call)

    def _forget(self, call: Call) -> None:
        call.end_wait()
        was_waiting = self._waiting.pop(call.generation, None) is not None
        if was_waiting and call.is_sent and not call.generation.is_detached:
            self._left.append((asyncio.get_running_loop().time(), call))

    def _cancel_left(self, client: TokenizerClient) -> None:
        """Send what was given up while nobody could be told, only to cancel it: the engine may still run it."""
        loop = asyncio.get_running_loop()
        left, self._left = self._left, []
        for left_s, call in left:
            if loop.time() - left_s < _ENGINE_KEEPS_S:
                client.submit(call)
                loop.call_later(_CANCEL_AFTER_S, call.generation.on_abandoned)

    def _give_up(self, call: Call, error: TokenloomError) -> None:
        now_s = asyncio.get_running_loop().time()
        more_s = self._left_at_s + self._takeover_limit_s - now_s
        if more_s > 0 and call.deadline_s > now_s and call.generation in self._waiting:
            self._wait_for_session(call, more_s, error)  # meanwhile one began to stop, or left
        elif self._waiting.pop(call.generation, None) is not None:
            call.generation.fail(error)


def _least_busy(clients: Iterable[TokenizerClient]) -> TokenizerClient | None:
    """Of those that take new requests, the one with the fewest choices in flight, of all callers and then of ours."""
    there = [client for client in clients if client.is_up and not client.is_draining]
    return min(there, key=lambda client: (client.load, client.num_choices), default=None)


def _unreachable() -> Unavailable:
    return Unavailable("no tokenizer can be reached", reason="NO_TOKENIZER", retry_after_s=1.0)
