from __future__ import annotations

import pytest

from tokenloom.common.auth import digest_of
from tokenloom.common.errors import Unauthenticated
from tokenloom.tokenizer.auth import Authenticator
from tokenloom.tokenizer.domain import Caller


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


def test_without_keys_everyone_is_one_tenant() -> None:
    assert Authenticator((), "").direct_caller({}) == Caller()


@pytest.mark.parametrize("metadata", [{}, bearer("wrong"), bearer(""), {"authorization": "Basic a"}, {"x": "a"}])
def test_an_unknown_key_is_refused(metadata: dict[str, str]) -> None:
    with pytest.raises(Unauthenticated):
        Authenticator(("a", "b"), "").direct_caller(metadata)


def test_each_key_is_a_tenant_that_shares_no_cache() -> None:
    authenticator = Authenticator(("a", "b"), "")
    first, second = (authenticator.direct_caller(bearer(key)) for key in "ab")
    assert first.tenant != second.tenant
    assert first.is_isolated
    assert authenticator.caller_of(digest_of("a")) == first
    assert not Authenticator(("a", "a"), "").direct_caller(bearer("a")).is_isolated


def test_a_gateway_needs_the_cluster_credential_and_may_call_everything() -> None:
    authenticator = Authenticator(("a",), "secret")
    authenticator.check_gateway(bearer("secret"))
    assert authenticator.direct_caller(bearer("secret")) == Caller()
    for metadata in ({}, bearer("a"), bearer("secre")):
        with pytest.raises(Unauthenticated):
            authenticator.check_gateway(metadata)


def test_the_callers_of_a_session_need_keys_of_their_own() -> None:
    with pytest.raises(Unauthenticated):
        Authenticator(("a",), "secret").caller_of(digest_of("secret"))
