"""Answers in OpenAI's form, built from a request's updates: as server-sent events, or as one JSON body."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import orjson

from tokenloom.common.errors import Internal
from tokenloom.gateway.event_ids import EventIds
from tokenloom.gateway.formats import Format
from tokenloom.gateway.generation import Accepted, ChoiceUpdate, Update, Usage
from tokenloom.gateway.http_errors import error_body, to_http

DONE = b"data: [DONE]\n\n"


@dataclass(frozen=True)
class AnswerHead:
    """What every piece of an answer repeats. Fixed before the request is first sent."""

    request_id: str
    created_s: int


def sse_event(data: Any) -> bytes:
    """One server-sent event. JSON from orjson has no line breaks, so one data line is enough.

    Source: WHATWG HTML, section 9.2.
    """
    return b"data: " + orjson.dumps(data) + b"\n\n"


def usage_body(usage: Usage) -> dict[str, Any]:
    """OpenAI's `usage`."""
    return {
        "prompt_tokens": usage.num_prompt_tokens,
        "completion_tokens": usage.num_generated_tokens,
        "total_tokens": usage.num_prompt_tokens + usage.num_generated_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.num_cached_tokens},
    }


class StreamAnswer:
    """Turns updates into the bytes of a stream: one call and one write per update, however many chunks it holds.

    Args:
        head: id and time of the answer.
        form: how the endpoint writes choices.
        includes_usage: end with a chunk that holds the usage (and has no choices).
        ids: of the events, if the stream is resumable; they say what was told before. An error has none: whoever comes
            back after it goes on behind the event before.
    """

    def __init__(self, head: AnswerHead, form: Format, includes_usage: bool, ids: EventIds | None = None) -> None:
        self._form = form
        self._includes_usage = includes_usage
        self._chunk: dict[str, Any] = {"id": head.request_id, "object": form.chunk_object, "created": head.created_s}
        self._extras: dict[str, Any] = {}
        self._ids = ids
        self._opened = set() if ids is None else ids.told_choices

    def begin(self, accepted: Accepted) -> None:
        """Note what the request's acceptance told."""
        self._chunk["model"] = accepted.model
        self._form.begin(accepted, frozenset(self._opened))
        if self._ids is None or not self._ids.is_resumed:  # the first chunk has them
            self._extras = self._form.extras(accepted, ())

    def render(self, update: Update) -> bytes:
        """The events of an update; the last one ends the stream, with an error event if the request failed."""
        events: list[bytes] = []
        for index in sorted(update.choices):
            for choice in self._choices(index, update.choices[index]):
                events.append((self._ids.of_choices() if self._ids else b"") + self._event([choice], None))
        if update.error is not None:
            events.append(sse_event(error_body(to_http(update.error))))
        if update.usage is not None:
            if self._includes_usage:
                events.append((self._ids.of_usage() if self._ids else b"") + self._event([], usage_body(update.usage)))
            events.append((self._ids.of_end() if self._ids else b"") + DONE)
        return b"".join(events)

    def _choices(self, index: int, update: ChoiceUpdate) -> Iterator[dict[str, Any]]:
        """The chunks of a choice, one after the other; what each tells is noted before it is handed out."""
        for part in update.earlier:
            yield from self._choices(index, part)
        if index not in self._opened:
            self._opened.add(index)
            if (first := self._form.first_chunk(index)) is not None:
                if self._ids:
                    self._ids.note(index)
                yield first
        has_chunk = update.text or update.token_ids or update.logprobs or update.prompt_logprobs
        if self._ids and (has_chunk or update.num_tokens):  # text may lag behind tokens
            self._ids.note(index, update.num_tokens, has_final_text=update.finish is not None)
        if has_chunk:
            yield self._form.chunk(index, update)
        if update.finish is not None:
            if self._ids:
                self._ids.note(index, is_finished=True)
            yield self._form.last_chunk(index, update.finish)

    def _event(self, choices: list[dict[str, Any]], usage: dict[str, Any] | None) -> bytes:
        chunk = {**self._chunk, "choices": choices, **self._extras}
        self._extras = {}
        if self._includes_usage:
            chunk["usage"] = usage
        return sse_event(chunk)


class WholeAnswer:
    """Collects updates into one body.

    Args:
        head: id and time of the answer.
        form: how the endpoint writes choices.
        num_choices: choices that the answer must have, over all prompts.
    """

    def __init__(self, head: AnswerHead, form: Format, num_choices: int) -> None:
        self._head = head
        self._form = form
        self._num_choices = num_choices
        self._accepted: Accepted | None = None
        self._texts: dict[int, list[str]] = {}
        self._choices: dict[int, ChoiceUpdate] = {}

    def add(self, update: Update) -> None:
        """Take an update in. Raises: its error."""
        if update.error is not None:
            raise update.error
        if update.accepted is not None:
            self._accepted = update.accepted
        for index, new in update.choices.items():
            choice = self._choices.setdefault(index, ChoiceUpdate())
            self._texts.setdefault(index, []).append(new.text)
            choice.echoed += new.echoed
            choice.num_tokens += new.num_tokens
            choice.token_ids += new.token_ids
            choice.logprobs += new.logprobs
            choice.prompt_logprobs += new.prompt_logprobs
            choice.finish = new.finish or choice.finish

    @property
    def num_entries(self) -> int:
        """Its size for those who write it."""
        return sum(choice.num_entries for choice in self._choices.values())

    def body(self, usage: Usage) -> bytes:
        """The whole answer as JSON.

        Raises: Internal if the request was called complete before it was accepted or before each choice had ended.
        """
        num_ended = sum(1 for choice in self._choices.values() if choice.finish is not None)
        if self._accepted is None or num_ended != self._num_choices or len(self._choices) != self._num_choices:
            raise Internal(f"the request was called complete with {num_ended} of {self._num_choices} choices ended")
        self._form.begin(self._accepted)
        choices = [self._choices[index] for index in sorted(self._choices)]
        for index, choice in enumerate(choices):
            choice.text = "".join(self._texts[index])
        return orjson.dumps(
            {
                "id": self._head.request_id,
                "object": self._form.whole_object,
                "created": self._head.created_s,
                "model": self._accepted.model,
                "choices": [self._form.whole(index, choice) for index, choice in enumerate(choices)],
                "usage": usage_body(usage),
                **self._form.extras(self._accepted, choices),
            }
        )
