"""Streams cut into their events, and put together from parts, as a client does that comes back."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from tests.openai_streams import joined


@dataclass(frozen=True)
class Event:
    """A complete event: its id (None: it has none) and its data, with the bytes of the stream up to its end."""

    id: str | None
    data: str
    end: int

    @property
    def chunk(self) -> dict[str, Any]:
        """The data's JSON."""
        found: dict[str, Any] = json.loads(self.data)
        return found


def events_in(stream: bytes) -> list[Event]:
    """The complete events of a stream that may be cut anywhere."""
    events, end = [], 0
    for block in stream.split(b"\n\n")[:-1]:
        end += len(block) + 2
        lines = dict(line.split(": ", 1) for line in block.decode().split("\n"))
        assert lines.keys() <= {"retry", "id", "data"}
        events.append(Event(lines.get("id"), lines["data"], end))
    return events


def told(events: list[Event]) -> dict[str, Any]:
    """What events tell together: choices, usage, error, end mark, and what each chunk repeats."""
    found = joined("".join(f"data: {event.data}\n\n" for event in events))
    chunks = [event.chunk for event in events if event.data != "[DONE]"]
    found["heads"] = {(chunk["id"], chunk["created"], chunk["model"], chunk["object"]) for chunk in chunks}
    return found
