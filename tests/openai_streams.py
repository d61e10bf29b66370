"""Streams in OpenAI's form, put together again: equal results are equal answers, whatever pieces they came in."""

from __future__ import annotations

import json
from typing import Any


def events_of(stream: str) -> list[dict[str, Any]]:
    """The JSON events of a stream's text; its end mark is none."""
    lines = [line.removeprefix("data: ") for line in stream.split("\n\n") if line]
    return [json.loads(line) for line in lines if line != "[DONE]"]


def joined(stream: str) -> dict[str, Any]:
    """A stream's choices by index, its usage, its error and whether its end mark came."""
    choices: dict[int, dict[str, Any]] = {}
    found: dict[str, Any] = {"choices": choices, "usage": None, "error": None}
    found["is_done"] = stream.endswith("data: [DONE]\n\n")
    for event in events_of(stream):
        found["usage"] = event.get("usage") or found["usage"]
        found["error"] = event.get("error") or found["error"]
        for choice in event.get("choices", ()):
            _add(choices.setdefault(choice["index"], _new_choice()), choice, event)
    return found


def _new_choice() -> dict[str, Any]:
    return {"num_roles": 0, "text": "", "logprobs": [], "token_ids": [], "prompt_token_ids": [], "ends": []}


def _add(into: dict[str, Any], choice: dict[str, Any], event: dict[str, Any]) -> None:
    delta = choice.get("delta", {})
    into["num_roles"] += "role" in delta
    into["text"] += delta.get("content") or choice.get("text") or ""
    into["token_ids"] += choice.get("token_ids") or []
    into["prompt_token_ids"] += choice.get("prompt_token_ids") or event.get("prompt_token_ids") or []
    if choice["finish_reason"]:
        into["ends"].append((choice["finish_reason"], choice["stop_reason"]))
    into["logprobs"] += logprobs_of(choice)


def logprobs_of(choice: dict[str, Any]) -> list[Any]:
    """Entries of a choice's logprobs: a chat's as they are, a completion's as (token, offset, logprob)."""
    logprobs = choice["logprobs"] or {}
    columns = (logprobs.get(name) or () for name in ("tokens", "text_offset", "token_logprobs"))
    return logprobs.get("content") or list(zip(*columns, strict=True))
