"""Ids of a resumable stream's events: how much was told up to each, and what a client says that comes back with one.

    <request id>:<choice>:<num_tokens>[+<num_cached_tokens>][t|e][,...]   of each choice, what was told so far
    <request id>:usage                                                    the usage too: only the end mark is missing
    <request id>:end                                                      everything

The numbers are of all choices of which something was told, since a client names the last event only. A choice that is
listed has had its opening chunk; text is a function of the number of tokens. With `t`, also the text that only its end
sets free was told (text of no token, see progress.py), with `e` the end. `num_cached_tokens` is for the usage, and left
out if it is 0.

The rest of a stream follows from such an id and the body that is sent again, so any gateway can tell it: the request id
gives the seed and the time of creation, the engine has the tokens or makes them again.

Source: WHATWG HTML, section 9.2, for ids, `retry` and the header Last-Event-ID.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

from starlette.datastructures import Headers

from tokenloom.gateway.http_errors import HttpError
from tokenloom.gateway.progress import Progress
from tokenloom.gateway.request_info import HEX_ID

LAST_EVENT_ID = "last-event-id"
MAX_NUM_CHOICES = 128
"""Choices of a resumable stream, over all prompts: all of them stand in each id."""
RETRY_MS = 1000
HEADER_DOCUMENT: dict[str, Any] = {
    "name": "Last-Event-ID",
    "in": "header",
    "required": False,
    "description": "Id of the last event that came of a resumable stream, whose body is sent again: what follows it is "
    "told. Any gateway can, for about a minute after the connection was lost or the stream had ended; later it is "
    "computed again.",
    "schema": {"type": "string", "maxLength": 4096},
}
"""The header as the OpenAPI document describes it."""
_MAX_CHARS = 4096
_COUNT = r"(0|[1-9]\d{0,9})"
_CHOICE = re.compile(rf"{_COUNT}:{_COUNT}(?:\+{_COUNT})?([te]?)", re.ASCII)
_MAX_U32 = 2**32 - 1


@dataclass(slots=True)
class ToldChoice:
    """What was told of a choice; see the head of this file."""

    num_tokens: int = 0
    num_cached_tokens: int = 0
    has_final_text: bool = False
    is_finished: bool = False

    def __str__(self) -> str:
        cached = f"+{self.num_cached_tokens}" if self.num_cached_tokens else ""
        return f"{self.num_tokens}{cached}{'e' if self.is_finished else 't' if self.has_final_text else ''}"


@dataclass(slots=True)
class Told:
    """What was told of a stream.

    Args:
        hex_id: of its request.
        choices: those of which something was told, by index.
        has_usage: all choices and, if asked for, the usage.
        is_whole: everything, the end mark too.
    """

    hex_id: str
    choices: dict[int, ToldChoice] = field(default_factory=dict)
    has_usage: bool = False
    is_whole: bool = False

    def note_in(self, progress: Progress) -> None:
        """Let a request's progress begin with it."""
        for index, told in self.choices.items():
            choice = progress.choice(index)
            choice.num_tokens = told.num_tokens
            choice.num_cached_tokens = told.num_cached_tokens or None
            choice.has_final_text = told.has_final_text
            choice.is_finished = told.is_finished


class EventIds:
    """Makes the ids of a stream.

    Args:
        request_id: of its request, with the endpoint's prefix.
        told: what was told before, if the client is back.
        progress: knows what was found in the prefix cache.
        num_per_prompt: choices per prompt, of which the first one's cached tokens count.
    """

    def __init__(self, request_id: str, told: Told | None, progress: Progress, num_per_prompt: int) -> None:
        self._request_id = request_id
        self._progress = progress
        self._num_per_prompt = num_per_prompt
        self._choices = {} if told is None else dict(told.choices)
        self._texts = {index: f"{index}:{choice}" for index, choice in self._choices.items()}
        self._is_first = True
        self.is_resumed = told is not None
        """Its first events were told to an earlier connection."""

    @property
    def told_choices(self) -> set[int]:
        """Indexes of the choices of which something was told."""
        return set(self._choices)

    def note(self, index: int, num_tokens: int = 0, *, has_final_text: bool = False, is_finished: bool = False) -> None:
        """More of a choice is told with the next event."""
        choice = self._choices.setdefault(index, ToldChoice())
        choice.num_tokens += num_tokens
        choice.has_final_text |= has_final_text
        choice.is_finished |= is_finished
        if index % self._num_per_prompt == 0:
            choice.num_cached_tokens = self._progress.choice(index).num_cached_tokens or 0
        self._texts[index] = f"{index}:{choice}"

    def of_choices(self) -> bytes:
        """The lines that go before an event of a choice, as of what was noted."""
        return self._lines(",".join(self._texts.values()))

    def of_usage(self) -> bytes:
        """The lines before the usage."""
        return self._lines("usage")

    def of_end(self) -> bytes:
        """The lines before the end mark."""
        return self._lines("end")

    def _lines(self, what: str) -> bytes:
        retry, self._is_first = f"retry: {RETRY_MS}\n" if self._is_first else "", False
        return f"{retry}id: {self._request_id}:{what}\n".encode()


def told_before(headers: Headers, id_prefix: str, num_choices: int) -> Told | None:
    """What a client that is back says was told to it; None: it asks for a new stream.

    Args:
        id_prefix: of the endpoint's request ids.
        num_choices: that the body asks for, over all prompts.

    Raises: HttpError, 400 and naming the header, if it is no id of such a stream.
    """
    values = headers.getlist(LAST_EVENT_ID)
    if not values:
        return None
    if len(values) > 1:
        raise _refusal("is given more than once")
    if len(values[0]) > _MAX_CHARS:
        raise _refusal(f"has more than {_MAX_CHARS} characters")
    request_id, _, what = values[0].partition(":")
    hex_id = request_id.removeprefix(id_prefix)
    if not request_id.startswith(id_prefix) or not HEX_ID.fullmatch(hex_id):
        raise _refusal("is no id of an event that this endpoint told")
    if what in ("usage", "end"):
        return Told(hex_id, has_usage=True, is_whole=what == "end")
    return Told(hex_id, _choices_of(what, num_choices))


def _choices_of(text: str, num_choices: int) -> dict[int, ToldChoice]:
    choices: dict[int, ToldChoice] = {}
    for part in text.split(","):
        if (match := _CHOICE.fullmatch(part)) is None:
            raise _refusal("is no id of an event that this endpoint told")
        index, num_tokens, num_cached = (int(group or 0) for group in match.groups()[:3])
        has_end_without_tokens = match[4] != "" and num_tokens == 0
        if index >= num_choices or index in choices or max(num_tokens, num_cached) > _MAX_U32 or has_end_without_tokens:
            raise _refusal("does not fit the request: the body must be the one that was sent first")
        choices[index] = ToldChoice(num_tokens, num_cached, match[4] != "", match[4] == "e")
    return choices


def _refusal(why: str) -> HttpError:
    return HttpError(400, f"{LAST_EVENT_ID}: {why}", param=LAST_EVENT_ID, code="invalid_value")
