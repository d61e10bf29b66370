"""API keys and the cluster credential.

Keys are compared as SHA-256 digests, every known one on each look-up, so that neither the time nor a log tells which
was nearly right. A digest, never a key, travels between stages.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Iterable

from tokenloom.common.errors import SetupError, Unauthenticated
from tokenloom.common.keys_file import Key, KeysFile, Tenant, read_keys_file

_TENANT_DIGITS = 16


def digest_of(key: str) -> bytes:
    """SHA-256 of a key: 32 bytes."""
    return hashlib.sha256(key.encode()).digest()


def bearer_of(header: str | None) -> str:
    """The key in an `authorization` header or metadata value; empty if there is none."""
    scheme, _, key = (header or "").partition(" ")
    return key.strip() if scheme.lower() == "bearer" else ""


class ApiKeys:
    """The keys that may use a public interface, and their tenants. Without keys it is open.

    Args:
        keys: with digests that differ.
        tenants: every tenant that a key names.
    """

    def __init__(self, keys: Iterable[Key] = (), tenants: Iterable[Tenant] = ()) -> None:
        self._keys = tuple(keys)
        self._tenants = tuple(tenants)

    @property
    def is_open(self) -> bool:
        """No key is needed."""
        return not self._keys

    @property
    def tenants(self) -> tuple[Tenant, ...]:
        """Whose keys they are, with what each may have."""
        return self._tenants

    def check(self, digest: bytes) -> Key | None:
        """The key with this digest; None if no keys are set.

        Raises: Unauthenticated if there are keys and this is none of them.
        """
        if self.is_open:
            return None
        found: Key | None = None
        for key in self._keys:
            if hmac.compare_digest(key.digest, digest):
                found = key
        if found is None:
            what = "unknown API key" if digest else "no API key: send `authorization: Bearer KEY`"
            raise Unauthenticated(what, reason="INVALID_API_KEY")
        return found


def load_api_keys(api_keys: Iterable[str], keys_file: str = "") -> ApiKeys:
    """All keys of a stage.

    Args:
        api_keys: keys as such; each is a tenant of its own, named by the first digits of its digest, without limits.
        keys_file: path of a keys file; empty: none.

    Raises: SetupError if the file cannot be used, or has one of `api_keys` too.
    """
    listed = read_keys_file(keys_file) if keys_file else KeysFile((), ())
    plain = {digest: Key(digest, digest.hex()[:_TENANT_DIGITS]) for digest in map(digest_of, api_keys)}
    for key in listed.keys:
        if key.digest in plain:
            message = f"keys file {keys_file}: a key of tenant {key.tenant} is also given by --api-key; expected in one"
            raise SetupError(message)
    tenants = {key.tenant: Tenant(key.tenant) for key in plain.values()}
    tenants |= {tenant.name: tenant for tenant in listed.tenants}
    return ApiKeys((*plain.values(), *listed.keys), tenants.values())
