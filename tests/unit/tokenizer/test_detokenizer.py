from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models

from tokenloom.tokenizer.assets import TokenizerAssets
from tokenloom.tokenizer.detokenizer import Detokenizer, decode_whole
from tokenloom.tokenizer.token_text import byte_level_alphabet

LINE = "Copy exactly: ďábelské 🌍 漢字 👩‍🚀 café"


def pieces_of(tokenizer: Tokenizer, ids: list[int], skipped: frozenset[int] = frozenset()) -> list[str]:
    detokenizer = Detokenizer(tokenizer, skipped)
    return [*[detokenizer.push(token_id) for token_id in ids], detokenizer.flush()]


def test_characters_over_several_tokens_come_whole(smollm: TokenizerAssets, tiny: TokenizerAssets) -> None:
    for assets in (smollm, tiny):
        ids = assets.tokenizer.encode(LINE, add_special_tokens=False).ids
        pieces = pieces_of(assets.tokenizer, ids)
        assert "".join(pieces) == LINE
        assert not any("\ufffd" in piece for piece in pieces)
        assert pieces[-1] == ""


@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_joined_pieces_equal_the_whole_decode_of_random_ids(data: st.DataObject, smollm: TokenizerAssets) -> None:
    size = smollm.tokenizer.get_vocab_size()
    # Low ids are special tokens and single bytes, of which most sequences are no characters.
    ids = data.draw(st.lists(st.integers(0, 300) | st.integers(0, size - 1), max_size=16))
    is_skipping = data.draw(st.booleans())
    skipped = smollm.special_token_ids if is_skipping else frozenset()

    assert "".join(pieces_of(smollm.tokenizer, ids, skipped)) == decode_whole(smollm.tokenizer, ids, is_skipping)


def test_half_a_character_at_the_end_is_told_as_the_whole_decode_tells_it(tiny: TokenizerAssets) -> None:
    ids = tiny.tokenizer.encode("ok 漢", add_special_tokens=False).ids[:-1]
    pieces = pieces_of(tiny.tokenizer, ids)
    assert "".join(pieces) == tiny.tokenizer.decode(ids)
    assert pieces[-1] == "\ufffd"


def test_special_tokens_are_left_out_or_shown(tiny: TokenizerAssets) -> None:
    ids = tiny.tokenizer.encode("a<|im_end|>b", add_special_tokens=False).ids
    assert "".join(pieces_of(tiny.tokenizer, ids, tiny.special_token_ids)) == "ab"
    assert "".join(pieces_of(tiny.tokenizer, ids)) == "a<|im_end|>b"


def test_flush_twice_says_nothing_new(tiny: TokenizerAssets) -> None:
    detokenizer = Detokenizer(tiny.tokenizer)
    detokenizer.push(tiny.tokenizer.encode("漢").ids[0])
    assert detokenizer.flush() == "\ufffd"
    assert detokenizer.flush() == ""


@pytest.mark.parametrize("text", ["Hello  world", "日本語 text", "a\nb"])
def test_sentencepiece_tokens_and_byte_fallback_decode_incrementally(text: str) -> None:
    tokenizer, words = sentencepiece_tokenizer(), SENTENCEPIECE_WORDS
    ids: list[int] = []
    rest = text.replace(" ", "▁") if text.startswith("a") else "▁" + text.replace(" ", "▁")
    while rest:
        word = next((w for w in words if rest.startswith(w)), "")
        ids += [words.index(word)] if word else [words.index(f"<0x{b:02X}>") for b in rest[0].encode()]
        rest = rest[len(word) or 1 :]
    assert "".join(pieces_of(tokenizer, ids)) == tokenizer.decode(ids) == text


@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_bytes_that_never_become_text_are_told_as_the_whole_decode_tells_them(
    data: st.DataObject, tiny: TokenizerAssets
) -> None:
    halves = [i for i in range(tiny.tokenizer.get_vocab_size()) if "\ufffd" in tiny.tokenizer.decode([i])]
    ids = data.draw(st.lists(st.sampled_from(halves) | st.integers(0, 511), min_size=10, max_size=60))
    assert "".join(pieces_of(tiny.tokenizer, ids)) == tiny.tokenizer.decode(ids, skip_special_tokens=False)


@pytest.mark.parametrize("bytes_of_token", [b"\x80", b"\xe6", b"\xf0\x90", b"\xa2\xe6\xbc"])
def test_no_more_than_a_few_tokens_wait_for_a_character(bytes_of_token: bytes) -> None:
    tokenizer = byte_tokenizer(bytes_of_token)
    detokenizer = Detokenizer(tokenizer)
    pieces = [detokenizer.push(0) for _ in range(200)]
    told = 0
    for count, piece in enumerate(pieces, 1):
        told += len(piece)
        assert told >= len(tokenizer.decode([0] * max(0, count - 9)))
    assert "".join([*pieces, detokenizer.flush()]) == tokenizer.decode([0] * 200)


def test_many_tokens_without_text_do_not_lose_the_space_before_the_next_word() -> None:
    tokenizer = Tokenizer(models.WordLevel({"▁a": 0, "": 1}, unk_token="▁a"))
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    ids = [0, *[1] * 30, 0]
    assert "".join(pieces_of(tokenizer, ids)) == tokenizer.decode(ids) == "a a"


@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_bytes_of_a_sentencepiece_model_that_are_no_text_lose_no_other_text(data: st.DataObject) -> None:
    num_words = len(SENTENCEPIECE_WORDS) - 256
    half = st.sampled_from([0xE6, 0xBC, 0xA2, 0x80]).map(lambda byte: num_words + byte)
    ids = data.draw(st.lists(half | half | half | st.integers(0, num_words - 1), max_size=40))
    tokenizer = sentencepiece_tokenizer()
    told, whole = "".join(pieces_of(tokenizer, ids)), tokenizer.decode(ids)
    assert [char for char in told if char.isascii()] == [char for char in whole if char.isascii()]
    if whole.isascii():
        assert told == whole


SENTENCEPIECE_WORDS = ["▁Hello", "▁▁", "▁", "world", "▁text", "a", "b", "\n", *[f"<0x{b:02X}>" for b in range(256)]]


def sentencepiece_tokenizer() -> Tokenizer:
    """A few words, and a token for each byte."""
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(SENTENCEPIECE_WORDS)}, unk_token="a"))
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return tokenizer


def byte_tokenizer(*tokens: bytes) -> Tokenizer:
    """A byte-level tokenizer with these tokens."""
    spelled = {byte: char for char, byte in byte_level_alphabet().items()}
    words = {"".join(spelled[byte] for byte in token): i for i, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token=next(iter(words))))
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer
