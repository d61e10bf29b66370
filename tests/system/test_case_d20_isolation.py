"""Case D20 over HTTP: who may find whose prefix in the cache."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.system.in_process import Stages, StagesOfModule, num_cached_tokens, stages_of_module

NUM_FULL = 48


@pytest.fixture(scope="module")
def stages(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StagesOfModule]:
    with stages_of_module(tmp_path_factory.mktemp("stack")) as running:
        yield running


def prompt_of(test: int) -> list[int]:
    return [(11 * i * i + test) % 500 + 3 for i in range(NUM_FULL + 2)]


def test_a_salt_sees_only_its_own_and_its_own_again(stages: StagesOfModule) -> None:
    async def test(stages: Stages) -> None:
        answers = [await stages.complete(prompt=prompt_of(0), max_tokens=4, cache_salt=salt) for salt in "ABA"]
        assert [num_cached_tokens(answer) for answer in answers] == [0, 0, NUM_FULL]
        assert len({tuple(answer["choices"][0]["token_ids"]) for answer in answers}) == 1

    stages.run(test)


@pytest.mark.parametrize("salts", [(None, "A", None, "A"), ("A", None, "A", None)])
def test_no_salt_and_a_salt_never_share(stages: StagesOfModule, salts: tuple[str | None, ...]) -> None:
    async def test(stages: Stages) -> None:
        prompt = prompt_of(1 if salts[0] is None else 2)
        answers = [await stages.complete(prompt=prompt, max_tokens=4, cache_salt=salt) for salt in salts]
        assert [num_cached_tokens(answer) for answer in answers] == [0, 0, NUM_FULL, NUM_FULL]

    stages.run(test)


def test_salts_that_look_alike_are_kept_apart(stages: StagesOfModule) -> None:
    async def test(stages: Stages) -> None:
        salts = ["a", "a\0", "\0a", "A", "a ", "aa", "á", "a\u0301", "\x01\0\0\0a", "a/", "/a"]
        for salt in salts:
            answer = await stages.complete(prompt=prompt_of(3), max_tokens=1, cache_salt=salt)
            assert num_cached_tokens(answer) == 0, repr(salt)
        answer = await stages.complete(prompt=prompt_of(3), max_tokens=1, cache_salt="")
        assert num_cached_tokens(answer) == 0, "an empty salt is none"
        answer = await stages.complete(prompt=prompt_of(3), max_tokens=1)
        assert num_cached_tokens(answer) == NUM_FULL, "an empty salt is none"

    stages.run(test)


def test_the_same_tokens_behind_another_beginning_are_not_found(stages: StagesOfModule) -> None:
    async def test(stages: Stages) -> None:
        prompt = prompt_of(4)
        await stages.complete(prompt=prompt, max_tokens=1)
        other = [prompt[0] + 1, *prompt[1:]]
        cold = await stages.complete(prompt=other, max_tokens=8)
        moved = await stages.complete(prompt=prompt[16:], max_tokens=8)
        assert num_cached_tokens(cold) == num_cached_tokens(moved) == 0

    stages.run(test)
