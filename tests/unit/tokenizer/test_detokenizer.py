from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models

from tokenloom.tokenizer.assets import TokenizerAssets
from tokenloom.tokenizer.detokenizer import Detokenizer, decode_whole

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
    words = ["▁Hello", "▁▁", "▁", "world", "▁text", "a", "b", "\n", *[f"<0x{b:02X}>" for b in range(256)]]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="a"))
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    ids: list[int] = []
    rest = text.replace(" ", "▁") if text.startswith("a") else "▁" + text.replace(" ", "▁")
    while rest:
        word = next((w for w in words if rest.startswith(w)), "")
        ids += [words.index(word)] if word else [words.index(f"<0x{b:02X}>") for b in rest[0].encode()]
        rest = rest[len(word) or 1 :]
    assert "".join(pieces_of(tokenizer, ids)) == tokenizer.decode(ids) == text
