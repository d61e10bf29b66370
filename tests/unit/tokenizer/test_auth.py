from __future__ import annotations

import pytest

from tokenloom.common.auth import ApiKeys, digest_of, load_api_keys
from tokenloom.common.errors import PermissionDenied, Unauthenticated
from tokenloom.common.keys_file import Key, Scope, Tenant
from tokenloom.tokenizer.auth import Authenticator
from tokenloom.tokenizer.domain import Caller

INFERENCE = Scope.INFERENCE


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


def of(*keys: str, token: str = "") -> Authenticator:
    return Authenticator(load_api_keys(keys), token)


def test_without_keys_everyone_is_one_tenant() -> None:
    assert of().direct_caller({}, INFERENCE) == Caller()


@pytest.mark.parametrize("metadata", [{}, bearer("wrong"), bearer(""), {"authorization": "Basic a"}, {"x": "a"}])
def test_an_unknown_key_is_refused(metadata: dict[str, str]) -> None:
    with pytest.raises(Unauthenticated):
        of("a", "b").direct_caller(metadata, None)


def test_each_key_is_a_tenant_that_shares_no_cache() -> None:
    authenticator = of("a", "b")
    first, second = (authenticator.direct_caller(bearer(key), INFERENCE) for key in "ab")
    assert first.tenant != second.tenant
    assert first.is_isolated
    assert authenticator.caller_of(digest_of("a"), INFERENCE) == first
    assert not of("a", "a").direct_caller(bearer("a"), INFERENCE).is_isolated


def test_keys_of_one_tenant_are_one_caller_but_for_class_and_scopes() -> None:
    keys = [
        Key(digest_of("fast"), "t"),
        Key(digest_of("slow"), "t", highest_class=2),
        Key(digest_of("operator"), "t", scopes=frozenset({Scope.CONTROL})),
    ]
    authenticator = Authenticator(ApiKeys(keys, [Tenant("t")]), "")
    assert authenticator.direct_caller(bearer("fast"), INFERENCE) == Caller("t", 0, is_isolated=False)
    assert authenticator.direct_caller(bearer("slow"), INFERENCE) == Caller("t", 2, is_isolated=False)
    with pytest.raises(PermissionDenied, match="inference"):
        authenticator.direct_caller(bearer("operator"), INFERENCE)
    with pytest.raises(PermissionDenied, match="control"):
        authenticator.direct_caller(bearer("fast"), Scope.CONTROL)
    assert authenticator.direct_caller(bearer("operator"), None).tenant == "t"
    assert authenticator.direct_caller(bearer("operator"), Scope.CONTROL).tenant == "t"


def test_a_gateway_needs_the_cluster_credential_and_may_call_everything() -> None:
    authenticator = of("a", token="secret")
    authenticator.check_gateway(bearer("secret"))
    assert authenticator.direct_caller(bearer("secret"), Scope.CONTROL) == Caller()
    for metadata in ({}, bearer("a"), bearer("secre")):
        with pytest.raises(Unauthenticated):
            authenticator.check_gateway(metadata)


def test_the_callers_of_a_session_need_keys_of_their_own() -> None:
    with pytest.raises(Unauthenticated):
        of("a", token="secret").caller_of(digest_of("secret"), INFERENCE)
