"""Text to token ids, off the event loop.

Texts that arrive while a batch is encoded form the next batch. `encode_batch_fast` releases the GIL and makes no
offsets or token strings, whose disposal alone would hold the loop up for tens of milliseconds. Long texts have a
thread of their own, so that short ones never queue behind them. Recent encodings are kept, least recently used out
first, within a bound in bytes.
"""

from __future__ import annotations

import asyncio
import time
from array import array
from collections import OrderedDict, deque
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import NamedTuple

from tokenizers import Tokenizer

from tokenloom.common.errors import InvalidArgument, ResourceExhausted
from tokenloom.tokenizer.assets import plain_copy
from tokenloom.tokenizer.metrics import ENCODE_SECONDS

_LONG_TEXT_BYTES = 16 << 10
_MAX_BATCH_TEXTS = 256
_ENTRY_OVERHEAD_BYTES = 256
_SLICE_TOKENS = 32_768
_PAUSE_S = 0.0002
_RETRY_AFTER_S = 1.0


class Segment(NamedTuple):
    """A piece of a prompt; in a plain one the names of special tokens are ordinary text."""

    text: str
    is_plain: bool = False


class _Key(NamedTuple):
    text: str
    add_special_tokens: bool
    is_plain: bool


@dataclass(slots=True)
class _Job:
    key: _Key
    num_bytes: int
    future: asyncio.Future[array[int]]


class Encoder:
    """Encodes texts for all requests of the stage.

    Args:
        tokenizer: not changed.
        max_text_bytes: longest text (UTF-8) that is accepted.
        cache_bytes: bound on the recent encodings kept, texts and ids.
        max_queued_bytes: bound on the texts that wait or are being encoded.
    """

    def __init__(self, tokenizer: Tokenizer, *, max_text_bytes: int, cache_bytes: int, max_queued_bytes: int) -> None:
        self._max_text_bytes = max_text_bytes
        self._max_queued_bytes = max_queued_bytes
        self._num_queued_bytes = 0
        self._cache = EncodingCache(cache_bytes)
        modes = {False: tokenizer, True: plain_copy(tokenizer)}
        self._short = _Lane("encode-short", modes)
        self._long = _Lane("encode-long", modes)
        newline = modes[True].encode("\n", add_special_tokens=False).ids
        self._newline = array("I", newline)
        special = (i for i, token in tokenizer.get_added_tokens_decoder().items() if token.special)
        self._special_ids = frozenset(special)

    async def encode(
        self, text: str, *, add_special_tokens: bool, is_plain: bool = False, field: str = "text"
    ) -> array[int]:
        """The ids of `text`.

        Args:
            add_special_tokens: add what the tokenizer puts around a text by itself, such as a BOS token.
            is_plain: names of special tokens in the text are ordinary text.
            field: what the caller calls the text, for errors.

        Returns: the ids; shared with the cache, so not to be changed.

        Raises: InvalidArgument if the text is too long or no Unicode; ResourceExhausted if too much is queued.
        """
        key = _Key(text, add_special_tokens, is_plain)
        if (ids := self._cache.get(key)) is not None:
            return ids
        num_bytes = self._size_of(text, field)
        if self._num_queued_bytes + num_bytes > self._max_queued_bytes:
            raise ResourceExhausted("too much text waits to be tokenised", retry_after_s=_RETRY_AFTER_S)
        lane = self._long if num_bytes > _LONG_TEXT_BYTES else self._short
        self._num_queued_bytes += num_bytes
        try:
            ids = await lane.encode(key, num_bytes)
        finally:
            self._num_queued_bytes -= num_bytes
        self._cache.put(key, ids, num_bytes)
        return ids

    async def encode_segments(self, segments: Sequence[Segment]) -> array[int]:
        """The ids of a rendered conversation, without special tokens of the tokenizer's own.

        Segments after the first are encoded behind a newline that is taken off again, since SentencePiece puts a space
        before a text's first word.

        Raises: as `encode`; InvalidArgument also if a plain segment cannot be encoded without a special token.
        """
        if len(segments) == 1 and not segments[0].is_plain:
            return await self.encode(segments[0].text, add_special_tokens=False, field="messages")
        ids = array("I")
        for i, (text, is_plain) in enumerate(segments):
            prefix = "\n" if i else ""
            encoded = await self.encode(prefix + text, add_special_tokens=False, is_plain=is_plain, field="messages")
            if i and encoded[: len(self._newline)] == self._newline:
                encoded = encoded[len(self._newline) :]
            elif i:
                encoded = await self.encode(text, add_special_tokens=False, is_plain=is_plain, field="messages")
            if is_plain and not self._special_ids.isdisjoint(encoded):
                raise InvalidArgument(f"{text!r} in a message cannot be told from a special token", field="messages")
            ids.extend(encoded)
        return ids

    def close(self) -> None:
        """Stop the threads; running batches are given up."""
        self._short.close()
        self._long.close()

    def _size_of(self, text: str, field: str) -> int:
        try:
            num_bytes = len(text.encode())
        except UnicodeEncodeError:
            raise InvalidArgument("the text holds half of a surrogate pair, which is no Unicode", field=field) from None
        if num_bytes > self._max_text_bytes:
            message = f"the text has {num_bytes} bytes; at most {self._max_text_bytes} are accepted"
            raise InvalidArgument(message, field=field)
        return num_bytes


class EncodingCache:
    """Recent encodings, least recently used out first.

    Args:
        max_bytes: bound on texts and ids together; an entry above an eighth of it is not kept.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._entries: OrderedDict[_Key, tuple[array[int], int]] = OrderedDict()
        self.num_bytes = 0

    def get(self, key: _Key) -> array[int] | None:
        """The ids kept for `key`, or None."""
        if (entry := self._entries.get(key)) is None:
            return None
        self._entries.move_to_end(key)
        return entry[0]

    def put(self, key: _Key, ids: array[int], num_text_bytes: int) -> None:
        """Keep an encoding; drops the least recently used ones until the bound holds."""
        size = num_text_bytes + len(ids) * ids.itemsize + _ENTRY_OVERHEAD_BYTES
        if size > self._max_bytes // 8 or key in self._entries:
            return
        self._entries[key] = (ids, size)
        self.num_bytes += size
        while self.num_bytes > self._max_bytes:
            _, (_, dropped) = self._entries.popitem(last=False)
            self.num_bytes -= dropped


class _Lane:
    """One thread that encodes whatever has queued up since its last batch."""

    def __init__(self, name: str, modes: dict[bool, Tokenizer]) -> None:
        self._modes = modes
        self._pool = ThreadPoolExecutor(1, thread_name_prefix=name)
        self._queue: deque[_Job] = deque()
        self._worker: asyncio.Task[None] | None = None

    async def encode(self, key: _Key, num_bytes: int) -> array[int]:
        loop = asyncio.get_running_loop()
        job = _Job(key, num_bytes, loop.create_future())
        self._queue.append(job)
        if self._worker is None:
            self._worker = loop.create_task(self._work())
        return await job.future

    def close(self) -> None:
        if self._worker is not None:
            self._worker.cancel()
        self._pool.shutdown(wait=False, cancel_futures=True)

    async def _work(self) -> None:
        loop = asyncio.get_running_loop()
        try:
            while self._queue:
                batch = self._next_batch()
                try:
                    results = await loop.run_in_executor(self._pool, self._encode, [job.key for job in batch])
                except Exception as error:  # told to each caller, where it is mapped and logged
                    for job in batch:
                        if not job.future.done():
                            job.future.set_exception(error)
                    continue
                for job, ids in zip(batch, results, strict=True):
                    if not job.future.done():
                        job.future.set_result(ids)
        finally:
            self._worker = None

    def _next_batch(self) -> list[_Job]:
        """Take waiting jobs, up to a batch's bounds; jobs whose callers have gone are dropped."""
        batch: list[_Job] = []
        num_bytes = 0
        while self._queue and len(batch) < _MAX_BATCH_TEXTS and num_bytes <= _LONG_TEXT_BYTES * 8:
            job = self._queue.popleft()
            if not job.future.done():
                batch.append(job)
                num_bytes += job.num_bytes
        return batch

    def _encode(self, keys: list[_Key]) -> list[array[int]]:
        """Runs in the lane's thread."""
        started_s = time.perf_counter()
        results: list[array[int] | None] = [None] * len(keys)
        for mode in {(key.add_special_tokens, key.is_plain) for key in keys}:
            places = [i for i, key in enumerate(keys) if (key.add_special_tokens, key.is_plain) == mode]
            texts = [keys[i].text for i in places]
            add_special_tokens, is_plain = mode
            encodings = self._modes[is_plain].encode_batch_fast(texts, add_special_tokens=add_special_tokens)
            for i, encoding in zip(places, encodings, strict=True):
                results[i] = _compact(encoding.ids)
        ENCODE_SECONDS.observe(time.perf_counter() - started_s)
        return [ids for ids in results if ids is not None]


def _compact(ids: list[int]) -> array[int]:
    """The ids at 4 bytes each; empties the list.

    In slices with pauses, since each step holds the GIL: the list of a megabyte's ids at once would hold the event loop
    up for longer than it took to make it.
    """
    compact = array("I")
    while len(ids) > _SLICE_TOKENS:
        compact.fromlist(ids[:_SLICE_TOKENS])
        del ids[:_SLICE_TOKENS]
        time.sleep(_PAUSE_S)
    compact.fromlist(ids)
    return compact
