from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.system.stack import Stack, running_stack


@pytest.fixture(scope="session")
def stack() -> Iterator[Stack]:
    """The embedded model in fp32, with the defaults otherwise."""
    with running_stack("--dtype=float32") as running:
        yield running
