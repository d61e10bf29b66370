from __future__ import annotations

import pytest

from tokenloom.common import errors
from tokenloom.gateway.http_errors import STATUS_OF, error_body, param_of, to_http


def all_subclasses() -> list[type[errors.TokenloomError]]:
    return errors.TokenloomError.__subclasses__()


def test_every_error_has_a_status() -> None:
    assert set(STATUS_OF) == set(all_subclasses())


def test_only_errors_that_trying_again_may_help_carry_retry_after() -> None:
    for cls in all_subclasses():
        error = to_http(cls("x"))
        assert ("retry-after" in (error.headers or {})) == (error.status in (429, 503))


@pytest.mark.parametrize(("wait_s", "header"), [(0.2, "1"), (1.2, "2"), (30.0, "30"), (None, "1")])
def test_retry_after_is_in_whole_seconds_and_at_least_one(wait_s: float | None, header: str) -> None:
    error = to_http(errors.ResourceExhausted("full", retry_after_s=wait_s))
    assert error.headers is not None
    assert error.headers["retry-after"] == header


def test_an_error_has_openais_form() -> None:
    refusal = errors.InvalidArgument("too hot", field="options.sampling.temperature", reason="OUT_OF_RANGE")
    assert error_body(to_http(refusal)) == {
        "error": {
            "message": "too hot",
            "type": "invalid_request_error",
            "param": "temperature",
            "code": "out_of_range",
        }
    }
    assert error_body(to_http(errors.Internal("x")))["error"]["type"] == "server_error"


@pytest.mark.parametrize(
    ("field", "param"),
    [
        ("", None),
        ("messages[0].content", "messages[0].content"),
        ("options.stop_strings", "stop"),
        ("stop_strings[2]", "stop[2]"),
        ("options.num_choices", "n"),
        ("options.sampling.top_p", "top_p"),
        ("options.stop.max_tokens", "max_tokens"),
        ("prompts[3].token_ids", "prompt"),
        ("prompt[1]", "prompt[1]"),
        ("stop", "stop"),
        ("chat_template_kwargs.tools", "chat_template_kwargs.tools"),
    ],
)
def test_fields_of_the_grpc_interface_get_their_http_names(field: str, param: str | None) -> None:
    assert param_of(field) == param
