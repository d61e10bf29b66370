"""One client: sends completions over a kept connection and times the chunks of their streams.

Plain asyncio streams instead of an HTTP library: reading a chunk costs about 45 us of CPU against 150 us with httpx
(measured on 2 cores of a Zen 2, 16,000 chunks), and a load client must not take the CPU from what it measures.
"""

from __future__ import annotations

import asyncio
import json
import ssl
import time
from dataclasses import dataclass, field
from typing import Any

from loadtest.settings import Settings

_MAX_CHUNK_BYTES = 16 << 20


@dataclass
class Outcome:
    """What became of a request. Times are seconds; `error` is empty if it ended well."""

    started_s: float
    ended_s: float = 0.0
    chunk_times_s: list[float] = field(default_factory=list)
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_output_tokens: int = 0
    error: str = ""

    @property
    def first_chunk_s(self) -> float:
        """From sending to the first text."""
        return self.chunk_times_s[0] - self.started_s

    @property
    def gaps_s(self) -> list[float]:
        """Between one chunk with text and the next."""
        return [later - earlier for earlier, later in zip(self.chunk_times_s, self.chunk_times_s[1:], strict=False)]


class RequestFailed(Exception):
    """A request that did not end well; the message is its kind."""


class Client:
    """A connection to the server, opened at need and kept."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._reader: asyncio.StreamReader | None = None
        self._writer: asyncio.StreamWriter | None = None

    async def complete(self, prompt: str) -> Outcome:
        """Run one request to its end. It never raises: what went wrong is in the outcome."""
        outcome = Outcome(time.perf_counter())
        try:
            async with asyncio.timeout(self._settings.timeout_s):
                await self._send(prompt)
                await self._receive(outcome)
        except RequestFailed as failure:
            outcome.error = str(failure)
        except TimeoutError:
            outcome.error = "timeout"
        except (OSError, asyncio.IncompleteReadError):
            outcome.error = "connection lost" if self._reader else "no connection"
        except (ValueError, asyncio.LimitOverrunError):
            outcome.error = "malformed answer"
        outcome.ended_s = time.perf_counter()
        if outcome.error:
            self.close()
        return outcome

    def close(self) -> None:
        """Drop the connection."""
        if self._writer is not None:
            self._writer.close()
        self._reader = self._writer = None

    async def _send(self, prompt: str) -> None:
        settings = self._settings
        if self._writer is None or self._writer.is_closing() or (self._reader and self._reader.at_eof()):
            self.close()
            context = ssl.create_default_context() if settings.is_tls else None
            self._reader, self._writer = await asyncio.open_connection(
                settings.host, settings.port, ssl=context, limit=_MAX_CHUNK_BYTES
            )
        body: dict[str, Any] = {
            "prompt": prompt,
            "max_tokens": settings.output_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if settings.model:
            body["model"] = settings.model
        data = json.dumps(body).encode()
        key = f"Authorization: Bearer {settings.api_key}\r\n" if settings.api_key else ""
        head = (
            f"POST /v1/completions HTTP/1.1\r\nHost: {settings.host}\r\nContent-Type: application/json\r\n{key}"
            f"Content-Length: {len(data)}\r\n\r\n"
        )
        self._writer.write(head.encode() + data)
        await self._writer.drain()

    async def _receive(self, outcome: Outcome) -> None:
        assert self._reader is not None
        head = (await self._reader.readuntil(b"\r\n\r\n")).decode("latin-1").lower()
        status = int(head.split(" ", 2)[1])
        if status != 200:
            raise RequestFailed(await self._refusal(status, head))
        if "transfer-encoding: chunked" not in head:
            raise ValueError("the answer is no stream")
        is_done, rest = False, b""
        while data := await self._chunk():
            now = time.perf_counter()
            *events, rest = (rest + data).split(b"\n\n")
            for event in events:
                is_done = _take(event.removeprefix(b"data: "), now, outcome) or is_done
        if not is_done:
            raise RequestFailed("stream cut short")
        if not outcome.chunk_times_s:
            raise RequestFailed("no text")

    async def _chunk(self) -> bytes:
        """The next chunk's data; empty at the end. Source: RFC 9112, section 7.1."""
        assert self._reader is not None
        size = int(await self._reader.readuntil(b"\r\n"), 16)
        data = await self._reader.readexactly(size + 2)
        return data[:-2]

    async def _refusal(self, status: int, head: str) -> str:
        """The kind of an error answer, e.g. `http 429 rate_limited`."""
        assert self._reader is not None
        lengths = [line.split(":", 1)[1] for line in head.split("\r\n") if line.startswith("content-length:")]
        if not lengths:
            return f"http {status}"
        try:
            error = json.loads(await self._reader.readexactly(int(lengths[0])))["error"]
            return f"http {status} {error['code'] or error['type']}"
        except (ValueError, KeyError, TypeError):
            return f"http {status}"


def _take(event: bytes, now_s: float, outcome: Outcome) -> bool:
    """Take an event's data in. Returns: whether it ends the stream. Raises: RequestFailed on an error event."""
    if event == b"[DONE]":
        return True
    chunk = json.loads(event)
    if error := chunk.get("error"):
        raise RequestFailed(f"stream error {error['code'] or error['type']}")
    if any(choice["text"] for choice in chunk["choices"]) and outcome.chunk_times_s[-1:] != [now_s]:
        outcome.chunk_times_s.append(now_s)
    if usage := chunk.get("usage"):
        outcome.num_prompt_tokens = usage["prompt_tokens"]
        outcome.num_output_tokens = usage["completion_tokens"]
        outcome.num_cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0)
    return False
