"""Which processes make up the stack, and with which flags."""

from __future__ import annotations

import secrets
from dataclasses import dataclass
from pathlib import Path

from tokenloom.common.config import child_environ, env_name
from tokenloom.launcher.config import ServeSettings

STAGES = ("executor", "scheduler", "tokenizer", "gateway")


@dataclass(frozen=True)
class StackPlan:
    """Command lines and environment of all stages.

    Args:
        argv: flags by stage.
        environ: of every stage; carries the secrets, which must not stand in a command line.
        sockets: gRPC address of each inner stage.
    """

    argv: dict[str, list[str]]
    environ: dict[str, str]
    sockets: dict[str, str]


def plan_stack(settings: ServeSettings, run_dir: Path) -> StackPlan:
    """Lay out the stack below `run_dir`, which only its owner may enter."""
    sockets = {name: f"unix:{run_dir}/{name}.sock" for name in STAGES[:3]}
    pages = {name: f"unix:{run_dir}/{name}.metrics" for name in STAGES[:3]}
    common = {
        "log_level": settings.log_level,
        "log_format": settings.log_format,
        "otlp_endpoint": settings.otlp_endpoint,
        "grace_s": settings.grace_s,
    }
    limits = {"max_num_seqs": settings.max_num_seqs, "max_num_batched_tokens": settings.max_num_batched_tokens}
    keys_file = str(Path(settings.keys_file).absolute()) if settings.keys_file else ""
    own: dict[str, dict[str, object]] = {
        "executor": {
            "model": settings.model,
            "dtype": settings.dtype,
            "device": settings.device,
            "kv_cache_bytes": settings.kv_cache_bytes,
            "max_model_len": settings.max_model_len,
            **limits,
        },
        "scheduler": {"executor": sockets["executor"], **limits},
        "tokenizer": {"scheduler": sockets["scheduler"], "model": settings.model, "keys_file": keys_file},
        "gateway": {
            "tokenizer": sockets["tokenizer"],
            "listen": f"{settings.host}:{settings.port}",
            "keys_file": keys_file,
        },
    }
    argv = {name: _flags({**common, **own[name]}) for name in STAGES}
    public = f",{settings.host}:{settings.grpc_port}" if settings.grpc_port else ""
    listen = {**sockets, "tokenizer": sockets["tokenizer"] + public}
    for name in STAGES[:3]:
        argv[name] += _flags({"listen": listen[name], "metrics_listen": pages[name]})
        argv["gateway"] += _flags({"metrics_from": pages[name]})
    environ = child_environ(**{env_name("cluster_token"): secrets.token_hex(32)})
    for name in ("api_key", "keys_file"):
        environ.pop(env_name(name), None)
    if settings.api_key:
        environ[env_name("api_key")] = ",".join(settings.api_key)
    return StackPlan(argv, environ, sockets)


def _flags(values: dict[str, object]) -> list[str]:
    """Flags for all values that are set; an empty text, or 0 for a count, leaves the stage's own default."""
    is_set = {name: value != "" and (value != 0 or isinstance(value, float)) for name, value in values.items()}
    return [f"--{name.replace('_', '-')}={value}" for name, value in values.items() if is_set[name]]
