"""API keys and the cluster credential.

Keys are compared as SHA-256 digests, every known one on each look-up, so that neither the time nor a log tells which
was nearly right. A digest, never a key, travels between stages.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Iterable

from tokenloom.common.errors import Unauthenticated


def digest_of(key: str) -> bytes:
    """SHA-256 of a key: 32 bytes."""
    return hashlib.sha256(key.encode()).digest()


def bearer_of(header: str | None) -> str:
    """The key in an `authorization` header or metadata value; empty if there is none."""
    scheme, _, key = (header or "").partition(" ")
    return key.strip() if scheme.lower() == "bearer" else ""


class ApiKeys:
    """The keys that may use a public interface. Without keys it is open."""

    def __init__(self, keys: Iterable[str]) -> None:
        self._digests = tuple(digest_of(key) for key in keys)

    @property
    def is_open(self) -> bool:
        """No key is needed."""
        return not self._digests

    def check(self, digest: bytes) -> None:
        """Raise Unauthenticated unless `digest` is that of a known key (or no keys are set)."""
        if self.is_open:
            return
        known = False
        for candidate in self._digests:
            known |= hmac.compare_digest(candidate, digest)
        if not known:
            what = "unknown API key" if digest else "no API key: send `authorization: Bearer KEY`"
            raise Unauthenticated(what, reason="INVALID_API_KEY")
