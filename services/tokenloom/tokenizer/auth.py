"""Who may call: API keys of people's clients, the cluster credential of gateways."""

from __future__ import annotations

import hmac
from collections.abc import Mapping

from tokenloom.common.auth import ApiKeys, bearer_of, digest_of
from tokenloom.common.errors import Unauthenticated
from tokenloom.tokenizer.domain import Caller

_TENANT_DIGITS = 16
_NO_KEY = b""


class Authenticator:
    """Checks callers.

    Args:
        api_keys: keys of the public interface; none: it is open.
        cluster_token: credential of gateways' sessions; empty: none is asked for.
    """

    def __init__(self, api_keys: tuple[str, ...], cluster_token: str) -> None:
        self._keys = ApiKeys(api_keys)
        self._has_tenants = len(set(api_keys)) > 1
        self._cluster_token = cluster_token.encode()

    def direct_caller(self, metadata: Mapping[str, str]) -> Caller:
        """Who makes a call with this metadata; the cluster credential opens everything.

        Raises: Unauthenticated without a known key.
        """
        key = bearer_of(metadata.get("authorization"))
        if self._cluster_token and hmac.compare_digest(key.encode(), self._cluster_token):
            return Caller()
        return self.caller_of(digest_of(key) if key else _NO_KEY)

    def caller_of(self, key_digest: bytes) -> Caller:
        """Whose key has this digest; each key is a tenant. Raises: Unauthenticated if nobody's."""
        self._keys.check(key_digest)
        if self._keys.is_open:
            return Caller()
        return Caller(key_digest.hex()[:_TENANT_DIGITS], is_isolated=self._has_tenants)

    def check_gateway(self, metadata: Mapping[str, str]) -> None:
        """Raise Unauthenticated unless the call carries the cluster credential (or none is set)."""
        sent = bearer_of(metadata.get("authorization")).encode()
        if self._cluster_token and not hmac.compare_digest(sent, self._cluster_token):
            raise Unauthenticated("the cluster credential is missing or wrong", reason="INVALID_CLUSTER_TOKEN")
