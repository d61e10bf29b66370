from __future__ import annotations

import pytest
from starlette.datastructures import Headers

from tokenloom.gateway.deadlines import time_limit_s
from tokenloom.gateway.http_errors import HttpError

LONGEST_S = 100.0


def headers(*values: str) -> Headers:
    return Headers(raw=[(b"x-request-timeout", value.encode("latin-1")) for value in values])


@pytest.mark.parametrize(
    ("body_s", "values", "limit_s"),
    [
        (None, [], 100.0),
        (2.5, [], 2.5),
        (None, ["2.5"], 2.5),
        (3.0, ["2"], 2.0),
        (2.0, ["3"], 2.0),
        (None, ["200"], 100.0),
        (200.0, ["300"], 100.0),
        (None, ["7", " 5 "], 5.0),
        (None, [".25"], 0.25),
        (None, ["1."], 1.0),
        (None, ["0.001"], 0.001),
        (None, ["86400"], 100.0),
    ],
)
def test_the_smallest_limit_holds(body_s: float | None, values: list[str], limit_s: float) -> None:
    assert time_limit_s(headers(*values), body_s, LONGEST_S) == limit_s


@pytest.mark.parametrize(
    "value",
    ["", "0", "0.0", "-1", "+1", "nan", "inf", "1e1", "1_0", "5s", "5, 6", "1,5", "0x5", ".", "86401", "1" * 400, "²"],
)
def test_what_is_no_time_is_refused_and_named(value: str) -> None:
    for values in ([value], ["5", value]):
        with pytest.raises(HttpError) as caught:
            time_limit_s(headers(*values), None, LONGEST_S)
        assert (caught.value.status, caught.value.param) == (400, "x-request-timeout")
        assert "seconds above 0" in caught.value.message
