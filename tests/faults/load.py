"""Many requests at once, when each of their events came, and whether an answer is the undisturbed one."""

from __future__ import annotations

import asyncio
import itertools
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import httpx

from tests.openai_streams import joined, logprobs_of

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
GREEDY: dict[str, Any] = {"temperature": 0}
_WORDS = (  # noqa: SIM905
    "the brave little fox wanted to learn mathematics and weather about the moon stars mountains sea story block "
    "memory tokens scheduler request prefix Paris Rome London Thames river numbers value list true false"
).split()
_LOGPROB_TOLERANCE = 1e-3
_TOKEN_EVENT = '"token_ids":['  # every event with tokens says them


@dataclass(frozen=True)
class Call:
    """One HTTP request."""

    path: str
    body: dict[str, Any]

    @property
    def is_stream(self) -> bool:
        return bool(self.body["stream"])


@dataclass(frozen=True)
class Shape:
    """What a load is made of.

    Args:
        num_streams: calls that stream.
        num_whole: calls that are answered in one piece.
        prompt_words: words per prompt, a token or two each.
        max_tokens: of every choice; ends of sequence are ignored.
        seed: of prompts and sampling.
    """

    num_streams: int = 64
    num_whole: int = 8
    prompt_words: int = 12
    max_tokens: int = 96
    seed: int = 0


@dataclass
class Answer:
    """What became of a call.

    Attributes:
        parts: of the stream, with the time at which each came.
        num_events: that brought tokens.
        error: why there is no answer; empty if there is one.
    """

    parts: list[tuple[float, str]] = field(default_factory=list)
    num_events: int = 0
    error: str = ""
    result: dict[str, Any] | None = None
    is_stream_over: bool = False

    def read(self) -> None:
        """Put a stream that is over together, and see whether an answer is whole.

        That takes milliseconds each, so it is done when all streams are over: it would hold the others' events up, and
        look like a pause of theirs.
        """
        if self.is_stream_over and self.result is None:
            self.result = joined("".join(text for _, text in self.parts))
        if self.result is not None:
            self.error = incomplete(self.result)

    def longest_gap_s(self, since_s: float) -> float | None:
        """The longest time without an event that ended after `since_s`; None if no event came before and after."""
        times = [at for at, _ in self.parts]
        if not times or times[0] > since_s or times[-1] < since_s:
            return None
        return max(b - a for a, b in itertools.pairwise(times) if b >= since_s)


class Load:
    """Calls that are sent together.

    Args:
        clients: of the gateways, used in turn.
    """

    def __init__(self, calls: Sequence[Call], clients: Sequence[httpx.AsyncClient]) -> None:
        self.calls = list(calls)
        self.answers = [Answer() for _ in calls]
        self._clients = clients
        self._changed = asyncio.Event()

    async def run(self) -> list[Answer]:
        """Send all calls; returns when all are over, however they ended."""
        await asyncio.gather(*(self._send(i) for i in range(len(self.calls))))
        self.read()
        return self.answers

    def read(self) -> None:
        """Put the answers together that are over."""
        for answer in self.answers:
            answer.read()

    async def until(self, holds: Callable[[Load], bool], limit_s: float) -> None:
        """Wait until something holds of the events that have come. Raises: TimeoutError."""
        async with asyncio.timeout(limit_s):
            while not holds(self):
                self._changed.clear()
                await self._changed.wait()

    @property
    def num_events(self) -> int:
        """Events with tokens that have come, of all streams."""
        return sum(answer.num_events for answer in self.answers)

    def num_begun(self, num_events: int = 1) -> int:
        """Streams that have so many events."""
        return sum(answer.num_events >= num_events for answer in self.answers)

    async def _send(self, number: int) -> None:
        call, answer = self.calls[number], self.answers[number]
        client = self._clients[number % len(self._clients)]
        try:
            if call.is_stream:
                await self._stream(client, call, answer)
                answer.is_stream_over = True
            else:
                response = await client.post(call.path, json=call.body)
                if response.status_code != 200:
                    raise RequestFailed(response.status_code, response.text)
                answer.result = whole(response.json())
        except RequestFailed as failure:
            answer.error = str(failure)
        except (httpx.HTTPError, ValueError) as error:
            answer.error = f"{type(error).__name__}: {error}"
        self._changed.set()

    async def _stream(self, client: httpx.AsyncClient, call: Call, answer: Answer) -> None:
        async with client.stream("POST", call.path, json=call.body) as response:
            if response.status_code != 200:
                raise RequestFailed(response.status_code, (await response.aread()).decode(errors="replace"))
            async for text in response.aiter_text():
                answer.parts.append((time.monotonic(), text))
                answer.num_events += text.count(_TOKEN_EVENT)
                self._changed.set()


class RequestFailed(Exception):
    """A call was answered with a status of failure."""

    def __init__(self, status: int, body: str) -> None:
        super().__init__(f"HTTP {status}: {body[:300]}")


def make_calls(shape: Shape) -> list[Call]:
    """Greedy and seeded, chat and completions, one choice and two, with and without logprobs and penalties.

    Prompts differ. Every third stream waits for a stop string, which `with_stops` puts in.
    """
    noise = random.Random(shape.seed)
    calls = []
    for i in range(shape.num_streams + shape.num_whole):
        text = " ".join([str(i), *noise.choices(_WORDS, k=shape.prompt_words)])
        is_stream = i < shape.num_streams
        kind = i % 6
        path = CHAT if kind in (1, 4) else COMPLETIONS
        seeded = {"temperature": 0.7, "seed": noise.randrange(1 << 31)}
        body: dict[str, Any] = {"max_tokens": shape.max_tokens, "ignore_eos": True, "return_token_ids": True}
        body |= {"stream": is_stream, **({"stream_options": {"include_usage": True}} if is_stream else {})}
        body |= {"messages": [{"role": "user", "content": text}]} if path == CHAT else {"prompt": text}
        body |= [
            GREEDY,  # 0
            {**seeded, "n": 2},  # 1, chat
            {**seeded, "logprobs": 2},  # 2
            {**GREEDY, "repetition_penalty": 1.1},  # 3
            {**GREEDY, "logprobs": True, "top_logprobs": 2},  # 4, chat
            {**seeded, "top_p": 0.9, "frequency_penalty": 0.2},  # 5
        ][kind]
        calls.append(Call(path, body))
    return calls


def with_stops(calls: Sequence[Call], answers: Sequence[Answer]) -> list[Call]:
    """The calls with a stop string in every third one, taken from the second half of its undisturbed text."""
    changed = list(calls)
    for i in range(0, len(calls), 3):
        result = answers[i].result
        assert result is not None, answers[i].error
        text = result["choices"][0]["text"]
        for at in range(len(text) * 3 // 5, len(text) - 8):
            if text.find(stop := text[at : at + 6]) == at and "\ufffd" not in stop:
                changed[i] = replace(calls[i], body={**calls[i].body, "stop": [stop, "never to be found"]})
                break
    return changed


def whole(body: dict[str, Any]) -> dict[str, Any]:
    """An answer in one piece, in the form of a stream's."""
    choices = {}
    for choice in body["choices"]:
        text = choice["text"] if "text" in choice else choice["message"]["content"]
        choices[choice["index"]] = {
            "text": text,
            "token_ids": choice.get("token_ids") or [],
            "logprobs": logprobs_of(choice),
            "ends": [(choice["finish_reason"], choice["stop_reason"])],
        }
    return {"choices": choices, "usage": body["usage"], "error": None, "is_done": True}


def incomplete(result: dict[str, Any]) -> str:
    """What an answer lacks; empty if it is whole."""
    if result["error"]:
        return f"error event: {result['error']}"
    if not result["is_done"]:
        return "the stream has no end mark"
    if not result["choices"] or result["usage"] is None:
        return "no choices, or no usage"
    for index, choice in result["choices"].items():
        if len(choice["ends"]) != 1:
            return f"choice {index} ended {len(choice['ends'])} times"
    return ""


def difference(found: dict[str, Any], expected: dict[str, Any]) -> str:
    """How an answer differs from the undisturbed one; empty if it does not.

    Logprobs may differ by 1e-3: kernels round by batch. What the prefix cache held does not count.
    """
    counts = ("prompt_tokens", "completion_tokens", "total_tokens")
    for name in counts:
        if found["usage"][name] != expected["usage"][name]:
            return f"{name} {found['usage'][name]} instead of {expected['usage'][name]}"
    if found["choices"].keys() != expected["choices"].keys():
        return f"choices {sorted(found['choices'])} instead of {sorted(expected['choices'])}"
    for index, choice in found["choices"].items():
        other = expected["choices"][index]
        for name in ("token_ids", "text", "ends"):
            if choice[name] != other[name]:
                return f"choice {index}: {name} {_first_difference(choice[name], other[name])}"
        if why := _logprobs_differ(choice["logprobs"], other["logprobs"]):
            return f"choice {index}: {why}"
    return ""


def _logprobs_differ(found: list[Any], expected: list[Any]) -> str:
    pairs = [
        [(e["token"], e["logprob"]) if isinstance(e, dict) else (e[0], e[2]) for e in x] for x in (found, expected)
    ]
    if [token for token, _ in pairs[0]] != [token for token, _ in pairs[1]]:
        return "tokens of the logprobs"
    for (_, one), (_, other) in zip(*pairs, strict=True):
        if (one is None) != (other is None) or abs((one or 0.0) - (other or 0.0)) > _LOGPROB_TOLERANCE:
            return f"logprob {one} instead of {other}"
    return ""


def _first_difference(found: Any, expected: Any) -> str:
    at = next(
        (i for i, (a, b) in enumerate(zip(found, expected, strict=False)) if a != b), min(len(found), len(expected))
    )
    return (
        f"at {at}: {found[at : at + 12]!r} (of {len(found)}) instead of {expected[at : at + 12]!r} (of {len(expected)})"
    )
