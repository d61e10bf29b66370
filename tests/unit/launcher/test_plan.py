from __future__ import annotations

from pathlib import Path

import pytest

from tokenloom.common.errors import SetupError
from tokenloom.launcher.config import ServeSettings
from tokenloom.launcher.plan import STAGES, plan_stack
from tokenloom.launcher.serve import main

RUN = Path("/run/stack")


def test_every_stage_is_told_its_neighbours() -> None:
    plan = plan_stack(ServeSettings(), RUN)
    assert set(plan.argv) == set(STAGES)
    assert "--executor=unix:/run/stack/executor.sock" in plan.argv["scheduler"]
    assert "--scheduler=unix:/run/stack/scheduler.sock" in plan.argv["tokenizer"]
    assert "--tokenizer=unix:/run/stack/tokenizer.sock" in plan.argv["gateway"]
    assert "--listen=127.0.0.1:8000" in plan.argv["gateway"]
    for name in STAGES[:3]:
        assert f"--listen={plan.sockets[name]}" in plan.argv[name]


def test_no_secret_stands_in_a_command_line() -> None:
    plan = plan_stack(ServeSettings(api_key=("hunter2", "hunter3")), RUN)
    assert plan.environ["TOKENLOOM_API_KEY"] == "hunter2,hunter3"
    token = plan.environ["TOKENLOOM_CLUSTER_TOKEN"]
    assert len(token) == 64
    words = " ".join(flag for argv in plan.argv.values() for flag in argv)
    assert "hunter" not in words
    assert token not in words


def test_stages_are_open_only_if_no_key_was_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOKENLOOM_API_KEY", "inherited")
    assert "TOKENLOOM_API_KEY" not in plan_stack(ServeSettings(), RUN).environ


def test_no_grace_is_not_the_default_grace() -> None:
    assert "--grace-s=0.0" in plan_stack(ServeSettings(grace_s=0.0), RUN).argv["executor"]


def test_what_is_not_set_keeps_the_stages_own_default() -> None:
    assert not any(flag.startswith("--dtype") for flag in plan_stack(ServeSettings(), RUN).argv["executor"])
    plan = plan_stack(ServeSettings(dtype="float32", max_num_seqs=3), RUN)
    assert "--dtype=float32" in plan.argv["executor"]
    assert "--max-num-seqs=3" in plan.argv["executor"]
    assert "--max-num-seqs=3" in plan.argv["scheduler"]


def test_the_keys_file_goes_to_the_stages_that_ask_for_keys(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TOKENLOOM_KEYS_FILE", "inherited.toml")
    monkeypatch.chdir(tmp_path)
    plan = plan_stack(ServeSettings(keys_file="keys.toml"), RUN)
    flag = f"--keys-file={tmp_path}/keys.toml"
    assert [name for name in STAGES if flag in plan.argv[name]] == ["tokenizer", "gateway"]
    assert "TOKENLOOM_KEYS_FILE" not in plan.environ
    plan = plan_stack(ServeSettings(), RUN)
    assert not any("--keys-file" in flag for argv in plan.argv.values() for flag in argv)
    assert "TOKENLOOM_KEYS_FILE" not in plan.environ


def test_a_fault_in_the_keys_is_told_before_any_stage_is_started(tmp_path: Path) -> None:
    path = tmp_path / "keys.toml"
    path.write_text("[[key]]\n")
    with pytest.raises(SetupError, match=r"keys\.toml: key 1: sha256 is missing"):
        main(["--keys-file", str(path), "--model", str(tmp_path / "none")])
