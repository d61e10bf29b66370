"""A client over HTTP that goes on when its connection is cut: the README's example, and all that it takes."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from typing import Any

import httpx


def stream(client: httpx.Client, urls: Iterable[str], body: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The chunks of a streamed answer. When a connection is lost, the next of the URLs takes it up where it was."""
    body = {**body, "stream": True, "resumable": True}
    headers: dict[str, str] = {}
    for url in urls:
        try:
            with client.stream("POST", url, json=body, headers=headers) as response:
                if response.status_code == 503:  # it has no tokenizer, or stops
                    continue
                response.raise_for_status()
                event: dict[str, str] = {}
                for line in response.iter_lines():
                    if line:
                        name, _, event[name] = line.partition(": ")
                        continue
                    if "id" in event:  # the event is complete
                        headers["Last-Event-ID"] = event["id"]
                    if event["data"] == "[DONE]":
                        return
                    yield json.loads(event["data"])
                    event = {}
        except httpx.TransportError:
            continue
    raise ConnectionError("no gateway is left")
