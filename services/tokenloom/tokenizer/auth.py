"""Who may call: API keys of people's clients, the cluster credential of gateways."""

from __future__ import annotations

import hmac
from collections.abc import Mapping

from tokenloom.common.auth import ApiKeys, bearer_of, digest_of
from tokenloom.common.errors import PermissionDenied, Unauthenticated
from tokenloom.common.keys_file import Scope
from tokenloom.tokenizer.domain import Caller

_NO_KEY = b""


class Authenticator:
    """Checks callers.

    Args:
        keys: keys of the public interface; none: it is open.
        cluster_token: credential of gateways' sessions; empty: none is asked for.
    """

    def __init__(self, keys: ApiKeys, cluster_token: str) -> None:
        self._keys = keys
        self._cluster_token = cluster_token.encode()

    def direct_caller(self, metadata: Mapping[str, str], scope: Scope | None) -> Caller:
        """Who makes a call with this metadata; the cluster credential opens everything.

        Raises: as `caller_of`.
        """
        key = bearer_of(metadata.get("authorization"))
        if self._cluster_token and hmac.compare_digest(key.encode(), self._cluster_token):
            return Caller()
        return self.caller_of(digest_of(key) if key else _NO_KEY, scope)

    def caller_of(self, key_digest: bytes, scope: Scope | None) -> Caller:
        """Whose key has this digest.

        Args:
            scope: what the key must be good for; None: any key will do.

        Raises: Unauthenticated if it is nobody's; PermissionDenied if it lacks the scope.
        """
        key = self._keys.check(key_digest)
        if key is None:
            return Caller()
        if scope is not None and scope not in key.scopes:
            raise PermissionDenied(f"this key lacks the scope {scope.value!r}", reason="SCOPE_MISSING")
        return Caller(key.tenant, key.highest_class, is_isolated=len(self._keys.tenants) > 1)

    def check_gateway(self, metadata: Mapping[str, str]) -> None:
        """Raise Unauthenticated unless the call carries the cluster credential (or none is set)."""
        sent = bearer_of(metadata.get("authorization")).encode()
        if self._cluster_token and not hmac.compare_digest(sent, self._cluster_token):
            raise Unauthenticated("the cluster credential is missing or wrong", reason="INVALID_CLUSTER_TOKEN")
