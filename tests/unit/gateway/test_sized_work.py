from __future__ import annotations

import asyncio
import threading

import pytest

from tokenloom.gateway.http_errors import HttpError
from tokenloom.gateway.json_route import read_body
from tokenloom.gateway.openai_types import ChatBody, CompletionBody
from tokenloom.gateway.sized_work import run_sized


def test_only_large_work_leaves_the_loops_thread() -> None:
    async def threads() -> list[bool]:
        return [await run_sized(is_large, threading.get_ident) == threading.get_ident() for is_large in (False, True)]

    assert asyncio.run(threads()) == [True, False]


def test_large_works_errors_reach_its_caller() -> None:
    with pytest.raises(HttpError) as caught:
        asyncio.run(run_sized(True, lambda: read_body(ChatBody, b"{")))
    assert (caught.value.status, caught.value.code) == (400, "invalid_json")


def test_a_body_of_more_values_than_any_field_takes_is_not_even_parsed() -> None:
    values = b'{"prompt":[' + b"1," * (1 << 20)
    with pytest.raises(HttpError) as caught:
        read_body(CompletionBody, values + b"1," * (1 << 17))
    assert caught.value.status == 413
    with pytest.raises(HttpError) as caught:
        read_body(CompletionBody, values)
    assert caught.value.code == "invalid_json"
