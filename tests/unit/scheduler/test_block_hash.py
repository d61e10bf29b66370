"""Names of blocks: pinned to digests of the scheme's text, and never shared between different prefixes."""

import hashlib
import struct

import pytest

from tokenloom.scheduler.core.block_hash import HASH_SCHEME, chain_hashes, root_hash

ROOT = "89fc0d099445199b167f0509a6b776c13585498b6de3f0b62f0b245a31395f5d"
FIRST = "f74a441c58d1f2360034cd875ad50cca8ab6c92baa968c8621ff53be5a352938"
SECOND = "695f0f444cdb86b2b91a06939917d0781f7e333d4430919f9eb02d428d2e8d5a"
LARGEST_ID = 2**32 - 1


def test_scheme_is_pinned_by_known_digests() -> None:
    assert HASH_SCHEME == "sha256-chain-1"
    assert root_hash().hex() == ROOT
    hashes = chain_hashes(root_hash(), [1, 2, 3, 4, 5, 6, 7, LARGEST_ID], block_size=4)
    assert [block_hash.hex() for block_hash in hashes] == [FIRST, SECOND]


def test_scheme_is_what_its_text_says() -> None:
    salt, adapter = "blüe".encode(), b"lora"
    root = hashlib.sha256(
        b"tokenloom/1" + struct.pack("<I", len(salt)) + salt + struct.pack("<I", len(adapter)) + adapter
    ).digest()
    assert root_hash("blüe", "lora") == root
    block = hashlib.sha256(root + struct.pack("<3I", 7, 0, LARGEST_ID)).digest()
    assert chain_hashes(root, [7, 0, LARGEST_ID], block_size=3) == [block]


def test_chain_can_be_continued_from_any_block() -> None:
    token_ids = list(range(12))
    whole = chain_hashes(root_hash(), token_ids, block_size=2)
    assert whole[:2] + chain_hashes(whole[1], token_ids[4:], block_size=2) == whole


@pytest.mark.parametrize("num_tokens", [0, 1, 3, 4, 7, 8])
def test_only_full_blocks_have_names(num_tokens: int) -> None:
    assert len(chain_hashes(root_hash(), list(range(num_tokens)), block_size=4)) == num_tokens // 4


def test_same_tokens_behind_different_parents_have_different_names() -> None:
    one, other = (chain_hashes(root_hash(), [first, 9, 5, 6], block_size=2) for first in (1, 2))
    assert one[1] != other[1]


def test_same_tokens_in_other_block_sizes_or_order_have_different_names() -> None:
    names = [
        chain_hashes(root_hash(), [1, 2], block_size=2)[-1],
        chain_hashes(root_hash(), [2, 1], block_size=2)[-1],
        chain_hashes(root_hash(), [1, 2], block_size=1)[-1],
    ]
    assert len(set(names)) == len(names)


def test_salts_and_adapters_that_look_alike_as_one_string_are_kept_apart() -> None:
    pairs = [("", ""), ("ab", "c"), ("a", "bc"), ("abc", ""), ("", "abc"), ("a\0", ""), ("a", "\0"), ("\1\0\0\0a", "")]
    assert len({root_hash(salt, adapter) for salt, adapter in pairs}) == len(pairs)
