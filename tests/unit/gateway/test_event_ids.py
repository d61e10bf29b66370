"""Ids of events: what they say is read back as it was, and nothing else is taken for one."""

from __future__ import annotations

import re
import time
from typing import Any

import pytest
from starlette.datastructures import Headers

from tokenloom.common.errors import Unavailable
from tokenloom.gateway.answers import AnswerHead, StreamAnswer
from tokenloom.gateway.event_ids import MAX_NUM_CHOICES, EventIds, Told, ToldChoice, told_before
from tokenloom.gateway.formats import ChatFormat, CompletionFormat, Format
from tokenloom.gateway.generation import Accepted, ChoiceUpdate, Finish, Update, Usage
from tokenloom.gateway.http_errors import HttpError
from tokenloom.gateway.progress import Progress
from tokenloom.gateway.request_info import HEX_ID, created_s_of, new_hex_id, seed_of

HEX = "019b0a5b3c4d7e8f9a0b1c2d3e4f5061"
REQUEST_ID = f"cmpl-{HEX}"


def read(value: str, num_choices: int = 4, prefix: str = "cmpl-") -> Told | None:
    return told_before(Headers({"last-event-id": value}), prefix, num_choices)


def ids_of(events: bytes) -> list[str]:
    return re.findall(r"^id: (.*)$", events.decode(), re.MULTILINE)


def test_without_the_header_a_stream_begins() -> None:
    assert told_before(Headers({}), "cmpl-", 1) is None


def test_what_an_id_says_is_read_back() -> None:
    progress = Progress()
    progress.choice(0).num_cached_tokens = 64
    progress.choice(1).num_cached_tokens = 64
    ids = EventIds(REQUEST_ID, None, progress, num_per_prompt=2)
    ids.note(2, 4_000_000_000)
    ids.note(0, 12)
    ids.note(1, 3, has_final_text=True)
    ids.note(0, 1, is_finished=True)
    (text,) = ids_of(ids.of_choices())
    assert text == f"{REQUEST_ID}:2:4000000000,0:13+64e,1:3t", "the first choice of a prompt tells what was cached"
    told = read(text)
    assert told == Told(
        HEX,
        {2: ToldChoice(4_000_000_000), 0: ToldChoice(13, 64, True, True), 1: ToldChoice(3, 0, True)},
    )
    again = EventIds(REQUEST_ID, told, progress, num_per_prompt=2)
    assert again.is_resumed
    assert ids_of(again.of_choices()) == [text]
    assert read(f"{REQUEST_ID}:usage") == Told(HEX, has_usage=True)
    assert read(f"{REQUEST_ID}:end") == Told(HEX, has_usage=True, is_whole=True)


def test_the_longest_id_of_all_is_taken() -> None:
    ids = EventIds(f"chatcmpl-{HEX}", None, progress := Progress(), num_per_prompt=1)
    for index in range(MAX_NUM_CHOICES):
        progress.choice(index).num_cached_tokens = 2**32 - 1
        ids.note(index, 2**32 - 1, is_finished=True)
    (text,) = ids_of(ids.of_choices())
    assert len(read(text, MAX_NUM_CHOICES, "chatcmpl-").choices) == MAX_NUM_CHOICES  # type: ignore[union-attr]


@pytest.mark.parametrize(
    "value",
    [
        "",
        ":",
        HEX,
        REQUEST_ID,
        f"{REQUEST_ID}:",
        f"{REQUEST_ID}:0",
        f"{REQUEST_ID}:0:",
        f"{REQUEST_ID}:0:-1",
        f"{REQUEST_ID}:00:1",
        f"{REQUEST_ID}:0:01",
        f"{REQUEST_ID}:0:1,",
        f"{REQUEST_ID}:0:1,0:2",
        f"{REQUEST_ID}:0:1 ,1:2",
        f"{REQUEST_ID}:0:1x",
        f"{REQUEST_ID}:0:0e",
        f"{REQUEST_ID}:0:0t",
        f"{REQUEST_ID}:0:1te",
        f"{REQUEST_ID}:0:1+",
        f"{REQUEST_ID}:0:1e+3",
        f"{REQUEST_ID}:0:²",
        f"{REQUEST_ID}:4:1",
        f"{REQUEST_ID}:0:4294967296",
        f"{REQUEST_ID}:0:1+4294967296",
        f"{REQUEST_ID}:0:99999999999",
        f"{REQUEST_ID}:done",
        f"{REQUEST_ID}:END",
        f"chatcmpl-{HEX}:0:1",
        f"{HEX}:0:1",
        f"cmpl-{HEX.upper()}:0:1",
        f"cmpl-{HEX[:-1]}:0:1",
        f"cmpl-{HEX}0:0:1",
        f"cmpl-{HEX[:12]}4{HEX[13:]}:0:1",
        f"cmpl-{HEX[:16]}7{HEX[17:]}:0:1",
        f"{REQUEST_ID}:" + ",".join(["0:1"] * 2000),
    ],
)
def test_whatever_else_is_refused_and_the_header_named(value: str) -> None:
    with pytest.raises(HttpError) as caught:
        read(value)
    assert (caught.value.status, caught.value.param) == (400, "last-event-id")
    assert len(caught.value.message) < 200


def test_two_of_them_are_none() -> None:
    headers = Headers(raw=[(b"last-event-id", f"{REQUEST_ID}:0:1".encode())] * 2)
    with pytest.raises(HttpError, match="more than once"):
        told_before(headers, "cmpl-", 1)


def test_request_ids_tell_their_time_and_give_a_seed() -> None:
    made = [new_hex_id() for _ in range(1000)]
    assert len(set(made)) == 1000
    assert all(HEX_ID.fullmatch(one) for one in made)
    assert abs(created_s_of(made[0]) - time.time()) < 5
    assert created_s_of(HEX) == 0x019B0A5B3C4D // 1000
    assert 0 <= seed_of("cmpl-a") < 2**63
    assert seed_of("cmpl-a") != seed_of("cmpl-b")


def update(**choices: Any) -> Update:
    return Update(choices={int(name[1:]): choice for name, choice in choices.items()})


def answer_of(form: Format, told: Told | None = None, includes_usage: bool = True) -> StreamAnswer:
    ids = EventIds(form.id_prefix + HEX, told, Progress(), num_per_prompt=2)
    answer = StreamAnswer(AnswerHead(form.id_prefix + HEX, 7), form, includes_usage, ids)
    answer.begin(Accepted("tiny", [[1, 2]]))
    return answer


def test_each_event_says_what_was_told_up_to_it_and_the_first_one_when_to_come_back() -> None:
    answer = answer_of(ChatFormat())
    first = answer.render(update(c0=ChoiceUpdate("a", num_tokens=1), c1=ChoiceUpdate("b", num_tokens=2)))
    assert first.startswith(b"retry: 1000\nid: ")
    assert first.count(b"retry") == 1
    texts = [text.partition(":")[2] for text in ids_of(first)]
    assert texts == ["0:0", "0:1", "0:1,1:0", "0:1,1:2"]
    lagging = answer.render(update(c0=ChoiceUpdate("", num_tokens=2)))
    assert lagging == b""
    last = answer.render(
        Update(
            choices={0: ChoiceUpdate("c", num_tokens=1, finish=Finish("stop")), 1: ChoiceUpdate(finish=Finish("stop"))},
            usage=Usage(1, 2, 0),
        )
    )
    texts = [text.partition(":")[2] for text in ids_of(last)]
    assert texts == ["0:4t,1:2", "0:4e,1:2", "0:4e,1:2e", "usage", "end"]
    assert b"retry" not in last
    assert all(event.count(b"data: ") == 1 for event in (first + last).split(b"\n\n")[:-1])


def test_tokens_without_text_before_an_end_count() -> None:
    answer = answer_of(CompletionFormat(), includes_usage=False)
    (text,) = ids_of(answer.render(update(c0=ChoiceUpdate("", num_tokens=2, finish=Finish("stop")))))
    assert text == f"{REQUEST_ID}:0:2e"


def test_an_error_has_no_id_so_that_its_reader_may_come_back() -> None:
    events = answer_of(ChatFormat()).render(Update(error=Unavailable("no tokenizer")))
    assert events.startswith(b'data: {"error"')


def test_who_is_back_gets_no_opening_and_no_prompt_ids_again() -> None:
    told = Told(HEX, {0: ToldChoice(3)})
    more = update(c0=ChoiceUpdate("c", num_tokens=1, token_ids=[9]), c1=ChoiceUpdate("d", num_tokens=1, token_ids=[8]))
    chat = answer_of(ChatFormat(has_token_ids=True), told).render(more)
    assert chat.count(b'"role"') == 1
    assert b"prompt_token_ids" not in chat
    assert ids_of(chat)[0].endswith(":0:4")
    completion = answer_of(CompletionFormat(has_token_ids=True, num_choices=2), told).render(more)
    assert completion.count(b"prompt_token_ids") == 1, "the other choice's"


def test_a_returning_clients_progress_begins_with_what_it_has() -> None:
    progress = Progress()
    Told(HEX, {1: ToldChoice(5, 3, True, True), 0: ToldChoice(2)}).note_in(progress)
    one, zero = progress.choice(1), progress.choice(0)
    assert (one.num_tokens, one.num_cached_tokens, one.has_final_text, one.is_finished) == (5, 3, True, True)
    assert (zero.num_tokens, zero.num_cached_tokens, zero.has_final_text, zero.is_finished) == (2, None, False, False)
    assert not progress.has_all_ids
