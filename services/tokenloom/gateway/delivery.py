"""Carries a generation to its HTTP client: as a stream of events or as one body.

The answer starts when the request was accepted; a refusal before that has a proper HTTP status. While the handler
works, a second task watches for the client's going away, which cancels the request at the tokenizer.
"""

from __future__ import annotations

import abc
import asyncio
from dataclasses import dataclass
from functools import partial

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from tokenloom.common.errors import Cancelled
from tokenloom.gateway import metrics
from tokenloom.gateway.answers import DONE, StreamAnswer, WholeAnswer
from tokenloom.gateway.connections import HttpConnection, connection_of
from tokenloom.gateway.convert import Start
from tokenloom.gateway.event_ids import EventIds, Told
from tokenloom.gateway.generation import Generation, Update
from tokenloom.gateway.request_info import RequestInfo, info_of
from tokenloom.gateway.sized_work import MAX_LOOP_ENTRIES, run_sized
from tokenloom.gateway.tokenizer_pool import TokenizerPool

# What a slow reader gets to take the error event before its connection is cut.
SLOW_READER_GRACE_S = 10.0
_BYTES_PER_WRITE = 64 << 10
_STREAM_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]


@dataclass(frozen=True)
class Job:
    """A request that is ready to be submitted.

    Args:
        generation: what will be filled.
        start: what is sent.
        timeout_s: longest time it may take, from its head on.
        pool: where it goes.
    """

    generation: Generation
    start: Start
    timeout_s: float
    pool: TokenizerPool


class Delivery(Response, abc.ABC):
    """An answer that is made while it is sent."""

    media_type = "application/json"

    def __init__(self, job: Job) -> None:
        super().__init__()
        self._job = job
        self._generation = job.generation

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Submit the request, answer, then release it whatever happened. Raises: TokenloomError before the answer."""
        generation, pool = self._generation, self._job.pool
        pool.submit(generation, self._job.start, self._job.timeout_s - info_of(scope).elapsed_s())
        watcher = asyncio.create_task(_cancel_on_disconnect(receive, generation))
        connection, cut = connection_of(scope), list[asyncio.TimerHandle]()
        if connection is not None:
            connection.on_stalled = generation.give_up_reader
            generation.on_slow_reader = partial(_cut_later, connection, cut)
        try:
            await self.deliver(scope, send)
        finally:
            if connection is not None:
                connection.on_stalled = _nothing
            for timer in cut:
                timer.cancel()
            watcher.cancel()
            generation.abandon(Cancelled("the answer was given up", reason="GIVEN_UP"))
            pool.release(generation)

    @abc.abstractmethod
    async def deliver(self, scope: Scope, send: Send) -> None:
        """Send the answer. Raises: TokenloomError while nothing was sent yet."""

    def note(self, info: RequestInfo, update: Update) -> None:
        """Count what an update brought."""
        if update.accepted is not None:
            info.span.set_attribute("gen_ai.response.model", update.accepted.model)
        if info.first_token_s is None and any(choice.num_tokens for choice in update.choices.values()):
            info.mark_first_token()
        for index, choice in update.choices.items():
            if choice.finish is not None:
                info.finish_reasons[index] = choice.finish.reason
        if update.usage is not None:
            metrics.PROMPT_TOKENS.inc(update.usage.num_prompt_tokens)
            metrics.GENERATED_TOKENS.inc(update.usage.num_generated_tokens)
            info.span.set_attribute("gen_ai.usage.input_tokens", update.usage.num_prompt_tokens)
            info.span.set_attribute("gen_ai.usage.output_tokens", update.usage.num_generated_tokens)
            reasons = [info.finish_reasons[index] for index in sorted(info.finish_reasons)]
            info.span.set_attribute("gen_ai.response.finish_reasons", reasons)
        if update.error is not None:
            info.error = update.error
            metrics.ENDED_EARLY.labels(update.error.reason.lower()).inc()


class WholeDelivery(Delivery):
    """One JSON body, when everything is there."""

    def __init__(self, job: Job, answer: WholeAnswer) -> None:
        super().__init__(job)
        self._answer = answer

    async def deliver(self, scope: Scope, send: Send) -> None:
        """Collect, then send."""
        info = info_of(scope)
        while True:
            update = await self._generation.next_update()
            self.note(info, update)
            self._answer.add(update)
            if update.usage is not None:
                break
        is_large = self._answer.num_entries > MAX_LOOP_ENTRIES
        body = await run_sized(is_large, partial(self._answer.body, update.usage))
        headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        for start in range(0, len(body), _BYTES_PER_WRITE):  # it counts as in flight until its reader took most of it
            part, is_last = body[start : start + _BYTES_PER_WRITE], start + _BYTES_PER_WRITE >= len(body)
            await send({"type": "http.response.body", "body": part, "more_body": not is_last})


class StreamDelivery(Delivery):
    """Server-sent events, one write per update."""

    def __init__(self, job: Job, answer: StreamAnswer) -> None:
        super().__init__(job)
        self._answer = answer

    async def deliver(self, scope: Scope, send: Send) -> None:
        """Send events as they come."""
        info, generation = info_of(scope), self._generation
        has_started = False
        while True:
            update = await generation.next_update()
            self.note(info, update)
            if update.error is not None and not has_started:
                raise update.error
            if update.accepted is not None:
                self._answer.begin(update.accepted)
            if not has_started and (update.accepted is not None or update.is_last):
                await send({"type": "http.response.start", "status": 200, "headers": _STREAM_HEADERS})
                has_started = True
            is_large = update.num_entries > MAX_LOOP_ENTRIES
            events = await run_sized(is_large, partial(self._answer.render, update))
            if events or update.is_last:
                await send({"type": "http.response.body", "body": events, "more_body": not update.is_last})
            if update.is_last:
                return


def end_of_stream(ids: EventIds, told: Told) -> Response:
    """What is left of a resumable stream behind its last chunk: the end mark, or nothing, which asks for no return.

    Source: WHATWG HTML, section 9.2.1, for status 204.
    """
    if told.is_whole:
        return Response(status_code=204)
    response = Response(ids.of_end() + DONE)
    response.raw_headers = [*_STREAM_HEADERS, (b"content-length", str(len(response.body)).encode())]
    return response


async def _cancel_on_disconnect(receive: Receive, generation: Generation) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    generation.abandon(Cancelled("the client went away", reason="CLIENT_DISCONNECTED"))


def _cut_later(connection: HttpConnection, timers: list[asyncio.TimerHandle]) -> None:
    """Cut the connection of a client that takes nothing, not even the error."""
    timers.append(asyncio.get_running_loop().call_later(SLOW_READER_GRACE_S, connection.abort))


def _nothing() -> None:
    """Nobody to tell."""
