from __future__ import annotations

from tokenizers import Tokenizer, decoders, models

from tokenloom.tokenizer.assets import TokenizerAssets
from tokenloom.tokenizer.token_text import TokenTexts, byte_level_alphabet

TEXT = "Käse 漢字 🌍\n\tand <|im_end|> done"


def test_bytes_of_tokens_joined_are_the_text(smollm: TokenizerAssets, tiny: TokenizerAssets) -> None:
    for assets in (smollm, tiny):
        texts = TokenTexts(assets.tokenizer)
        ids = assets.tokenizer.encode(TEXT, add_special_tokens=False).ids
        assert b"".join(texts.lookup(i)[1] for i in ids).decode() == TEXT


def test_byte_level_alphabet_covers_all_bytes_once() -> None:
    assert sorted(byte_level_alphabet().values()) == list(range(256))


def test_half_a_character_shows_as_replacement_and_keeps_its_bytes(tiny: TokenizerAssets) -> None:
    first = tiny.tokenizer.encode("漢", add_special_tokens=False).ids[0]
    text, utf8 = TokenTexts(tiny.tokenizer).lookup(first)
    assert text == "\ufffd"
    assert "漢".encode().startswith(utf8)


def test_an_id_that_the_tokenizer_does_not_use_has_no_text(tiny: TokenizerAssets) -> None:
    assert TokenTexts(tiny.tokenizer).lookup(100_000) == ("", b"")


def test_sentencepiece_spaces_and_lone_bytes() -> None:
    tokenizer = Tokenizer(models.WordLevel({"▁Paris": 0, "<0xE6>": 1, "<pad>": 2}, unk_token="<pad>"))
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    texts = TokenTexts(tokenizer)
    assert texts.lookup(0) == (" Paris", b" Paris")
    assert texts.lookup(1) == ("\ufffd", b"\xe6")


def test_other_decoders_tell_by_decoding() -> None:
    tokenizer = Tokenizer(models.WordLevel({"hel": 0, "##lo": 1}, unk_token="hel"))
    tokenizer.decoder = decoders.WordPiece()
    assert TokenTexts(tokenizer).lookup(0) == ("hel", b"hel")
