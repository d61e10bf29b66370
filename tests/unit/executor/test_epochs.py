"""Who may begin an epoch while another scheduler has one."""

from __future__ import annotations

import pytest

from tokenloom.common.errors import FailedPrecondition
from tokenloom.executor import epochs as module
from tokenloom.executor.epochs import Epochs


def replaced() -> tuple[Epochs, int, str]:
    """An executor that one scheduler had and another one has, the first one's counter, and the second one's stream."""
    epochs = Epochs()
    first = epochs.begin()
    epochs.join("old stream")
    epochs.check(epochs.boot_id, first, "old stream")
    epochs.begin()
    epochs.join("new stream")
    return epochs, first, "new stream"


def test_a_replaced_scheduler_may_not_take_the_executor_back_while_the_other_one_has_a_stream() -> None:
    epochs, first, new_stream = replaced()
    with pytest.raises(FailedPrecondition) as refusal:
        epochs.check_not_replaced(epochs.boot_id, first)
    assert refusal.value.reason == "EXECUTOR_IN_USE"
    epochs.end("old stream")
    with pytest.raises(FailedPrecondition):
        epochs.check_not_replaced(epochs.boot_id, first)
    epochs.end(new_stream)
    epochs.check_not_replaced(epochs.boot_id, first)


def test_between_a_new_epoch_and_its_stream_it_may_not_either_unless_that_takes_too_long(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    epochs = Epochs()
    first = epochs.begin()
    epochs.begin()
    with pytest.raises(FailedPrecondition):
        epochs.check_not_replaced(epochs.boot_id, first)
    monkeypatch.setattr(module, "_JOIN_LIMIT_S", 0.0)
    epochs.check_not_replaced(epochs.boot_id, first)


def test_whoever_has_the_current_epoch_or_one_of_another_boot_may_begin_a_new_one() -> None:
    epochs, first, _ = replaced()
    epochs.check_not_replaced(epochs.boot_id, first + 1)
    epochs.check_not_replaced("an earlier process", first)
