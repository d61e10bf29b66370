"""What resumable requests had generated when they ended, kept for readers who come back for it.

Kept for a time and within a bound in bytes; the one that nobody asked for longest goes first. Time is an argument.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from tokenloom.common.errors import TokenloomError
from tokenloom.scheduler import metrics
from tokenloom.scheduler.core.request import FinishReason, PromptLogprobs, Request
from tokenloom.scheduler.frames import TokenRow
from tokenloom.scheduler.sessions import rows_since

# As measured in memory: the entry with its empty columns, a row, an id with its logprob, an id in an array.
_ENTRY_BYTES = 600
_ROW_BYTES = 250
_LOGPROB_BYTES = 72
_ID_BYTES = 4


@dataclass(frozen=True, slots=True, eq=False)
class FinishedRequest:
    """One that has ended.

    Args:
        group_id: choices of one call share it.
        settings: sampling and stops, serialised; whoever asks with others asks for another request.
        output_token_ids: all that it generated, also what came behind a stop string.
        told: rows with logprobs, if they were asked for.
        told_prompt: runs of prompt logprobs, likewise.
        num_without_logprobs: tokens at the begin whose logprobs were asked for and are lost.
    """

    request_id: str
    group_id: str
    tenant: str
    cache_salt: str
    settings: bytes
    prompt_token_ids: array[int]
    output_token_ids: array[int]
    told: Sequence[TokenRow]
    told_prompt: Sequence[PromptLogprobs]
    num_without_logprobs: int
    num_cached_tokens: int
    reason: FinishReason
    error: TokenloomError | None

    @property
    def num_bytes(self) -> int:
        """What it takes, roughly."""
        texts = (self.request_id, self.group_id, self.tenant, self.cache_salt, self.error.message if self.error else "")
        num_ids = len(self.prompt_token_ids) + len(self.output_token_ids)
        num_entries = sum(len(row.logprobs.token_ids) for row in self.told)
        num_entries += sum(len(run.token_ids) for run in self.told_prompt)
        num_rows = len(self.told) + len(self.told_prompt)
        rows = num_rows * _ROW_BYTES + num_entries * _LOGPROB_BYTES
        return _ENTRY_BYTES + sum(map(len, texts)) + len(self.settings) + num_ids * _ID_BYTES + rows

    def is_same(self, request: Request, settings: bytes) -> bool:
        """`request` is this one submitted again, with the ids that its reader has; all that it lacks is here."""
        return (
            len(request.output_token_ids) >= self.num_without_logprobs
            and (self.tenant, self.cache_salt, self.settings) == (request.tenant, request.cache_salt, settings)
            and self.prompt_token_ids == array("I", request.prompt_token_ids)
            and self.output_token_ids[: len(request.output_token_ids)] == array("I", request.output_token_ids)
        )

    def rows_since(self, token_index: int) -> list[TokenRow]:
        """What a reader lacks that has the tokens before `token_index`."""
        return rows_since(self.told, self.output_token_ids, token_index)


@dataclass(slots=True)
class _Kept:
    finished: FinishedRequest
    num_bytes: int
    expires_s: float


class FinishedStore:
    """Finished requests by id.

    Args:
        keep_s: how long each is kept since it ended or was last asked for.
        max_bytes: bound on all of them together.
        max_entry_bytes: larger ones are not kept.
    """

    def __init__(self, keep_s: float, max_bytes: int, max_entry_bytes: int) -> None:
        self._keep_s = keep_s
        self._max_bytes = max_bytes
        self._max_entry_bytes = min(max_bytes, max_entry_bytes)
        self._kept: OrderedDict[str, _Kept] = OrderedDict()
        self._num_bytes = 0

    def __len__(self) -> int:
        return len(self._kept)

    @property
    def num_bytes(self) -> int:
        """What all of them take, roughly."""
        return self._num_bytes

    @property
    def next_s(self) -> float | None:
        """When `expire` has to be called next; None: nothing is kept."""
        return next((kept.expires_s for kept in self._kept.values()), None)

    def keep(self, finished: FinishedRequest, now_s: float) -> bool:
        """Keep one, in place of an older one of its id. Returns: False if it is too large."""
        self._drop(finished.request_id)
        num_bytes = finished.num_bytes
        if num_bytes <= self._max_entry_bytes and self._keep_s > 0:
            self._kept[finished.request_id] = _Kept(finished, num_bytes, now_s + self._keep_s)
            self._num_bytes += num_bytes
            while self._num_bytes > self._max_bytes:
                self._drop(next(iter(self._kept)))
        self._show()
        return finished.request_id in self._kept

    def find(self, request_id: str, now_s: float) -> FinishedRequest | None:
        """The one of this id, which is kept longer now; None: nothing is known of it."""
        self.expire(now_s)
        if (found := self._kept.get(request_id)) is None:
            return None
        found.expires_s = now_s + self._keep_s
        self._kept.move_to_end(request_id)
        return found.finished

    def forget(self, request_or_group_id: str) -> None:
        """Keep a request, or all choices of a group, no longer."""
        of_group = [id_ for id_, kept in self._kept.items() if kept.finished.group_id == request_or_group_id]
        for request_id in (request_or_group_id, *of_group):
            self._drop(request_id)
        self._show()

    def expire(self, now_s: float) -> None:
        """Drop what was kept long enough."""
        while (next_s := self.next_s) is not None and next_s <= now_s:
            self._drop(next(iter(self._kept)))
        self._show()

    def clear(self) -> None:
        """Drop everything."""
        self._kept.clear()
        self._num_bytes = 0
        self._show()

    def _drop(self, request_id: str) -> None:
        if (found := self._kept.pop(request_id, None)) is not None:
            self._num_bytes -= found.num_bytes

    def _show(self) -> None:
        metrics.KEPT_REQUESTS.set(len(self._kept))
        metrics.KEPT_BYTES.set(self._num_bytes)
