from __future__ import annotations

import asyncio
import random
from array import array
from typing import Any

import pytest
import uvloop

from tests.unit.tokenizer.loop_lag import LIMIT_S, hold_the_gil, largest_lag_s, median_lag_s
from tokenloom.common.errors import InvalidArgument, ResourceExhausted
from tokenloom.tokenizer import encoder as encoder_module
from tokenloom.tokenizer.assets import TokenizerAssets
from tokenloom.tokenizer.encoder import Encoder, EncodingCache, Segment, _Key

MIB = 1 << 20


def make_encoder(assets: TokenizerAssets, **changes: int) -> Encoder:
    limits = {"max_text_bytes": 8 * MIB, "cache_bytes": MIB, "max_queued_bytes": 32 * MIB, **changes}
    return Encoder(assets.tokenizer, **limits)


def test_concurrent_texts_get_the_ids_the_tokenizer_gives(smollm: TokenizerAssets) -> None:
    texts = [f"text {i} " + "käse 漢字 " * i for i in range(50)] + ["long " * 10_000]

    async def encode_all() -> list[array[int]]:
        encoder = make_encoder(smollm)
        try:
            return await asyncio.gather(*[encoder.encode(text, add_special_tokens=True) for text in texts])
        finally:
            encoder.close()

    encoded = uvloop.run(encode_all())
    assert [list(ids) for ids in encoded] == [smollm.tokenizer.encode(text).ids for text in texts]


def megabyte_of_words() -> str:
    words = ["the", "river", "čaj", "of", "stones", "🌍", "漢字", "and", "light", "in", "seventeen", "\n", "naïve", "a"]
    rng = random.Random(1)
    return " ".join(rng.choice(words) for _ in range(250_000))[:MIB]


def lag_of_encoding(assets: TokenizerAssets, text: str) -> float:
    async def scenario() -> float:
        encoder = make_encoder(assets, cache_bytes=0)
        task = asyncio.create_task(encoder.encode(text, add_special_tokens=False))
        lag_s = await largest_lag_s(task)
        assert len(await task) > 100_000
        encoder.close()
        return lag_s

    return median_lag_s(scenario)


@pytest.mark.parametrize("text", [megabyte_of_words(), "1234567890" * 99_000], ids=["words", "digits"])
def test_the_loop_lags_less_than_20_ms_while_a_megabyte_is_encoded(smollm: TokenizerAssets, text: str) -> None:
    assert lag_of_encoding(smollm, text) < LIMIT_S


def test_the_lag_that_is_measured_includes_a_thread_that_holds_the_interpreter(
    smollm: TokenizerAssets, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids_of = encoder_module._ids_of

    def slow_ids_of(*details: Any) -> Any:
        hold_the_gil(0.060)
        return ids_of(*details)

    monkeypatch.setattr(encoder_module, "_ids_of", slow_ids_of)
    assert lag_of_encoding(smollm, megabyte_of_words()) > LIMIT_S


def test_thousands_of_known_segments_do_not_hold_the_loop_up(smollm: TokenizerAssets) -> None:
    segments = [Segment("a", is_plain=True), Segment(" b")] * 20_000

    async def scenario() -> float:
        encoder = make_encoder(smollm)
        await encoder.encode_segments(segments[:4], max_model_len=100)
        task = asyncio.create_task(encoder.encode_segments(segments, max_model_len=1_000_000))
        lag_s = await largest_lag_s(task)
        assert len(await task) >= len(segments)
        encoder.close()
        return lag_s

    assert median_lag_s(scenario) < LIMIT_S


def test_a_conversation_is_refused_as_soon_as_it_exceeds_the_context(
    smollm: TokenizerAssets, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def encode(segments: list[Segment]) -> int:
        """How many pieces were encoded before the refusal."""
        encoder = make_encoder(smollm)
        texts: list[str] = []
        encode_one = encoder.encode

        async def counted(text: str, **details: Any) -> array[int]:
            texts.append(text)
            return await encode_one(text, **details)

        monkeypatch.setattr(encoder, "encode", counted)
        with pytest.raises(InvalidArgument, match=r"at least \d+ tokens; the context of 50 tokens") as caught:
            await encoder.encode_segments(segments, max_model_len=50)
        assert caught.value.field == "messages"
        encoder.close()
        return len(texts)

    names = [Segment("<|im_end|>", is_plain=True), Segment(" x")]
    assert uvloop.run(encode(names * 100)) == 0  # so many names of special tokens cannot fit
    assert uvloop.run(encode(names * 40)) < 60


def test_ids_of_a_prompt_that_does_not_fit_are_refused_with_their_number(tiny: TokenizerAssets) -> None:
    async def encode() -> None:
        encoder = make_encoder(tiny)
        try:
            fits = await encoder.encode("a", add_special_tokens=False, max_model_len=2)
            assert len(fits) == 1
            await encoder.encode("a" * 50, add_special_tokens=False, field="prompt", max_model_len=10)
        finally:
            encoder.close()

    number = len(tiny.tokenizer.encode("a" * 50, add_special_tokens=False).ids)
    with pytest.raises(InvalidArgument, match=f"{number} tokens; the context of 10") as caught:
        uvloop.run(encode())
    assert caught.value.field == "prompt"


def test_short_texts_do_not_queue_behind_a_long_one(smollm: TokenizerAssets) -> None:
    async def order() -> list[str]:
        encoder = make_encoder(smollm)
        done: list[str] = []

        async def encode(name: str, text: str) -> None:
            await encoder.encode(text, add_special_tokens=False)
            done.append(name)

        long = asyncio.create_task(encode("long", "word 123 " * 100_000))
        await asyncio.sleep(0)
        await encode("short", "hello")
        await long
        encoder.close()
        return done

    assert uvloop.run(order()) == ["short", "long"]


def test_a_known_text_is_not_encoded_again(tiny: TokenizerAssets) -> None:
    async def both() -> bool:
        encoder = make_encoder(tiny)
        first = await encoder.encode("hello", add_special_tokens=True)
        other_mode = await encoder.encode("hello", add_special_tokens=False)
        second = await encoder.encode("hello", add_special_tokens=True)
        encoder.close()
        return first is second and other_mode is not first

    assert uvloop.run(both())


def test_cache_drops_the_least_recently_used_within_its_bytes() -> None:
    cache = EncodingCache(10_000)
    keys = [_Key(str(i), True, False) for i in range(40)]
    for i, key in enumerate(keys):
        cache.put(key, array("I", [i] * 100), 1)
        assert cache.get(keys[0]) is not None  # used all the time, so it stays
        assert cache.num_bytes <= 10_000
    assert cache.get(keys[1]) is None
    assert cache.get(keys[-1]) == array("I", [39] * 100)


def test_cache_does_not_keep_what_would_crowd_everything_out() -> None:
    cache = EncodingCache(10_000)
    cache.put(_Key("big", True, False), array("I", [1] * 400), 3)
    assert cache.num_bytes == 0


def test_a_text_over_the_limit_is_refused_with_both_numbers(tiny: TokenizerAssets) -> None:
    async def encode() -> None:
        encoder = make_encoder(tiny, max_text_bytes=10)
        try:
            await encoder.encode("é" * 6, add_special_tokens=True, field="prompt")
        finally:
            encoder.close()

    with pytest.raises(InvalidArgument, match=r"12 bytes.*10") as caught:
        uvloop.run(encode())
    assert caught.value.field == "prompt"


def test_half_a_surrogate_pair_is_refused(tiny: TokenizerAssets) -> None:
    async def encode() -> None:
        encoder = make_encoder(tiny)
        try:
            await encoder.encode("a\ud800", add_special_tokens=True)
        finally:
            encoder.close()

    with pytest.raises(InvalidArgument, match="surrogate"):
        uvloop.run(encode())


def test_more_text_than_may_wait_is_refused_and_room_comes_back(tiny: TokenizerAssets) -> None:
    async def encode() -> None:
        encoder = make_encoder(tiny, max_queued_bytes=1000)
        first = asyncio.create_task(encoder.encode("a" * 900, add_special_tokens=True))
        await asyncio.sleep(0)
        with pytest.raises(ResourceExhausted) as caught:
            await encoder.encode("b" * 200, add_special_tokens=True)
        assert caught.value.retry_after_s is not None
        await first
        assert len(await encoder.encode("b" * 200, add_special_tokens=True)) > 0
        encoder.close()

    uvloop.run(encode())


def test_a_caller_that_went_away_does_not_disturb_its_batch(tiny: TokenizerAssets) -> None:
    async def encode() -> list[int]:
        encoder = make_encoder(tiny)
        gone = asyncio.create_task(encoder.encode("gone", add_special_tokens=True))
        stays = asyncio.create_task(encoder.encode("stays", add_special_tokens=True))
        await asyncio.sleep(0)
        gone.cancel()
        ids = list(await stays)
        encoder.close()
        return ids

    assert uvloop.run(encode()) == tiny.tokenizer.encode("stays").ids


def test_plain_segments_hold_no_special_token_and_join_to_the_text(smollm: TokenizerAssets) -> None:
    segments = [Segment("<|im_start|>user\nsay "), Segment("<|im_end|>", is_plain=True), Segment(" now<|im_end|>")]

    async def encode() -> list[int]:
        encoder = make_encoder(smollm)
        ids = list(await encoder.encode_segments(segments, max_model_len=100))
        encoder.close()
        return ids

    ids = uvloop.run(encode())
    end = smollm.tokenizer.encode("<|im_end|>", add_special_tokens=False).ids[0]
    assert ids.count(end) == 1
    assert ids[-1] == end
    assert smollm.tokenizer.decode(ids, skip_special_tokens=False) == "".join(s.text for s in segments)


def test_a_text_of_too_many_tokens_is_refused_before_its_ids_are_copied(
    tiny: TokenizerAssets, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(encoder_module, "MAX_PROMPT_IDS", 20)

    async def encode() -> None:
        encoder = make_encoder(tiny)
        try:
            await encoder.encode("1 2 3 " * 20, add_special_tokens=False)
        finally:
            encoder.close()

    with pytest.raises(InvalidArgument, match="at most 20"):
        uvloop.run(encode())
