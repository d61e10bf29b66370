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

from tokenizers import Encoding, Tokenizer

from tokenloom.common.errors import InvalidArgument, ResourceExhausted
from tokenloom.tokenizer.assets import plain_copy
from tokenloom.tokenizer.metrics import ENCODE_SECONDS
from tokenloom.tokenizer.validation import MAX_PROMPT_IDS, check_prompt_length, shortened

_LONG_TEXT_BYTES = 16 << 10
_MAX_BATCH_TEXTS = 256
_ENTRY_OVERHEAD_BYTES = 256
_SLICE_TOKENS = 32_768
_SEGMENTS_AT_ONCE = 64
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
    field: str
    max_model_len: int | None
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
        self,
        text: str,
        *,
        add_special_tokens: bool,
        is_plain: bool = False,
        field: str = "text",
        max_model_len: int | None = None,
    ) -> array[int]:
        """The ids of `text`.

        Args:
            add_special_tokens: add what the tokenizer puts around a text by itself, such as a BOS token.
            is_plain: names of special tokens in the text are ordinary text.
            field: what the caller calls the text, for errors.
            max_model_len: the context, if the text is a prompt that must fit it. The ids of a longer one are not even
                looked at.

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
            ids = await lane.encode(key, num_bytes, field, max_model_len)
        finally:
            self._num_queued_bytes -= num_bytes
        self._cache.put(key, ids, num_bytes)
        return ids

    async def encode_segments(self, segments: Sequence[Segment], *, max_model_len: int) -> array[int]:
        """The ids of a rendered conversation, without special tokens of the tokenizer's own.

        Segments after the first are encoded behind a newline that is taken off again, since SentencePiece puts a space
        before a text's first word.

        Raises: as `encode`; InvalidArgument also if a plain segment cannot be encoded without a special token, and as
            soon as the prompt is longer than the context.
        """
        if len(segments) == 1 and not segments[0].is_plain:
            return await self._encode_segment(segments[0], "", max_model_len)
        num_plain = sum(segment.is_plain for segment in segments)  # each is the name of a special token
        check_prompt_length(num_plain, max_model_len, "messages", "at least ")
        ids = array("I")
        for i, segment in enumerate(segments):
            encoded = await self._encode_segment(segment, "\n" if i else "", max_model_len)
            if i and encoded[: len(self._newline)] == self._newline:
                encoded = encoded[len(self._newline) :]
            elif i:
                encoded = await self._encode_segment(segment, "", max_model_len)
            if segment.is_plain and not self._special_ids.isdisjoint(encoded):
                message = f"{shortened(segment.text)} in a message cannot be told from a special token"
                raise InvalidArgument(message, field="messages")
            ids.extend(encoded)
            check_prompt_length(len(ids), max_model_len, "messages", "at least ")
            if i % _SEGMENTS_AT_ONCE == _SEGMENTS_AT_ONCE - 1:  # known ones come from the cache without a pause
                await asyncio.sleep(0)
        return ids

    async def _encode_segment(self, segment: Segment, prefix: str, max_model_len: int) -> array[int]:
        return await self.encode(
            prefix + segment.text,
            add_special_tokens=False,
            is_plain=segment.is_plain,
            field="messages",
            max_model_len=max_model_len,
        )

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

    async def encode(self, key: _Key, num_bytes: int, field: str, max_model_len: int | None) -> array[int]:
        loop = asyncio.get_running_loop()
        job = _Job(key, num_bytes, field, max_model_len, loop.create_future())
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
                    results = await loop.run_in_executor(self._pool, self._encode, batch)
                except Exception as error:  # told to each caller, where it is mapped and logged
                    for job in batch:
                        if not job.future.done():
                            job.future.set_exception(error)
                    continue
                for job, result in zip(batch, results, strict=True):
                    if job.future.done():
                        continue
                    if isinstance(result, InvalidArgument):
                        job.future.set_exception(result)
                    else:
                        job.future.set_result(result)
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

    def _encode(self, jobs: list[_Job]) -> list[array[int] | InvalidArgument]:
        """Runs in the lane's thread."""
        started_s = time.perf_counter()
        results: dict[int, array[int] | InvalidArgument] = {}
        for mode in {(job.key.add_special_tokens, job.key.is_plain) for job in jobs}:
            places = [i for i, job in enumerate(jobs) if (job.key.add_special_tokens, job.key.is_plain) == mode]
            texts = [jobs[i].key.text for i in places]
            add_special_tokens, is_plain = mode
            encodings = self._modes[is_plain].encode_batch_fast(texts, add_special_tokens=add_special_tokens)
            for i, encoding in zip(places, encodings, strict=True):
                results[i] = _ids_of(encoding, jobs[i])
        ENCODE_SECONDS.observe(time.perf_counter() - started_s)
        return [results[i] for i in range(len(jobs))]


def _ids_of(encoding: Encoding, job: _Job) -> array[int] | InvalidArgument:
    """The ids, or the refusal of too many, which are not even looked at.

    A list of a million ids holds the GIL, and with it the event loop, for about 12 ms.
    """
    num_tokens = len(encoding)
    try:
        if job.max_model_len is not None:
            check_prompt_length(num_tokens, job.max_model_len, job.field)
        if num_tokens > MAX_PROMPT_IDS:
            message = f"the text has {num_tokens} tokens; at most {MAX_PROMPT_IDS} are accepted"
            raise InvalidArgument(message, field=job.field)
    except InvalidArgument as error:
        return error
    return _compact(encoding.ids)


def _compact(ids: list[int]) -> array[int]:
    """The ids at 4 bytes each; empties the list, from its end, in slices with pauses in which other threads run."""
    slices: list[array[int]] = []
    while ids:
        slices.append(array("I", ids[-_SLICE_TOKENS:]))
        del ids[-_SLICE_TOKENS:]
        if ids:
            time.sleep(_PAUSE_S)
    compact = array("I")
    for part in reversed(slices):
        compact.extend(part)
    return compact
