"""Names of KV blocks: the hash chain that the prefix cache and routers use (scheme "sha256-chain-1").

    root        = SHA-256("tokenloom/1" | len(salt) | salt | len(adapter) | adapter)
    hash(block) = SHA-256(hash(parent) | token ids)

Lengths and ids are 4 bytes little endian; the parent is the block before or the root. Lengths stand before strings so
that no two pairs of salt and adapter spell the same bytes. A cryptographic digest with the parent inside needs no
comparison of tokens: two different prefixes never share a name (GHSA reports on vLLM's earlier built-in hash).
"""

from __future__ import annotations

import hashlib
import sys
from array import array
from collections.abc import Sequence

HASH_SCHEME = "sha256-chain-1"
_U32 = "I"
assert array(_U32).itemsize == 4


def root_hash(salt: str = "", adapter: str = "") -> bytes:
    """The parent of every first block under a salt and an adapter: 32 bytes."""
    digest = hashlib.sha256(b"tokenloom/1")
    for text in (salt.encode(), adapter.encode()):
        digest.update(len(text).to_bytes(4, "little"))
        digest.update(text)
    return digest.digest()


def chain_hashes(parent: bytes, token_ids: Sequence[int], block_size: int) -> list[bytes]:
    """Hashes of the full blocks in `token_ids`, the first one's parent being `parent`."""
    num_blocks = len(token_ids) // block_size
    ids = array(_U32, token_ids[: num_blocks * block_size])
    if sys.byteorder == "big":
        ids.byteswap()
    data, width = ids.tobytes(), block_size * 4
    hashes = []
    for start in range(0, num_blocks * width, width):
        parent = hashlib.sha256(parent + data[start : start + width]).digest()
        hashes.append(parent)
    return hashes
