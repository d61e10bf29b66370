"""When our own kernels serve, and who serves when they cannot."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch

from tokenloom.common.config import ProcessSettings
from tokenloom.common.errors import SetupError
from tokenloom.common.model_files import resolve_model
from tokenloom.executor import build
from tokenloom.executor.config import ExecutorConfig
from tokenloom.executor.gate import ModelRefused
from tokenloom.executor.native.build import NativeUnavailable

CPU = torch.device("cpu")


def config(**values: Any) -> ExecutorConfig:
    return ExecutorConfig(ProcessSettings(), **values)


def refuse_with(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    def refuse(*_: Any) -> Any:
        raise error

    monkeypatch.setattr(build, "build_native", refuse)


@pytest.mark.parametrize("values", [{"cpu_kernels": "torch"}, {"dtype": "float32"}, {"attention_backend": "torch"}])
def test_who_asks_for_torch_gets_torch(monkeypatch: pytest.MonkeyPatch, values: dict[str, str]) -> None:
    refuse_with(monkeypatch, AssertionError("nobody asked for it"))
    assert build._build_native(config(**values), resolve_model("embedded"), CPU) is None


@pytest.mark.parametrize(
    ("error", "level"),
    [(NativeUnavailable("no compiler"), logging.INFO), (ModelRefused("the fast path differs"), logging.WARNING)],
)
def test_torch_serves_what_the_kernels_cannot_and_the_log_says_why(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, error: Exception, level: int
) -> None:
    refuse_with(monkeypatch, error)
    with caplog.at_level(logging.INFO):
        assert build._build_native(config(), resolve_model("embedded"), CPU) is None
    (record,) = caplog.records
    assert record.levelno == level
    assert str(error) in record.getMessage()
    with pytest.raises(SetupError, match=f"--cpu-kernels native: {error}"):
        build._build_native(config(cpu_kernels="native"), resolve_model("embedded"), CPU)


def test_they_are_for_cpus() -> None:
    with pytest.raises(SetupError, match="they are for CPUs, and the device is cuda"):
        build._build_native(config(cpu_kernels="native"), resolve_model("embedded"), torch.device("cuda"))
