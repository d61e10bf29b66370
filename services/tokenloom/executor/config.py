"""Settings of the executor stage."""

from __future__ import annotations

from dataclasses import dataclass

from tokenloom.common.config import (
    ProcessSettings,
    non_negative_int,
    non_negative_seconds,
    parse_bytes,
    positive_int,
    set_default_env,
    setting,
)
from tokenloom.common.model_files import EMBEDDED


@dataclass(frozen=True)
class ExecutorConfig:
    """What the executor is told at start."""

    process: ProcessSettings
    listen: str = setting("127.0.0.1:50053", "Where to serve gRPC: host:port or unix:PATH.")
    model: str = setting(EMBEDDED, "A folder (safetensors or a GGUF file), a .gguf file, a hub id, or `embedded`.")
    dtype: str = setting(
        "auto",
        "Of weights and KV; auto: bfloat16 where the hardware computes in it, else float32.",
        choices=("auto", "bfloat16", "float32"),
    )
    device: str = setting("auto", "Where to compute; auto: a GPU if there is one.", choices=("auto", "cpu", "cuda"))
    kv_cache_bytes: int = setting(1 << 30, "Memory for keys and values, such as 1GiB.", parse=parse_bytes)
    block_size: int = setting(16, "Tokens per block of KV memory.", parse=positive_int)
    max_num_seqs: int = setting(64, "Most rows of a step.", parse=positive_int)
    max_num_batched_tokens: int = setting(512, "Most tokens of a step.", parse=positive_int)
    max_model_len: int = setting(0, "Longest sequence in tokens; 0: the model's own limit.", parse=non_negative_int)
    num_threads: int = setting(0, "Threads of a forward pass; 0: one per core.", parse=non_negative_int)
    plan_hang_limit_s: float = setting(
        60.0,
        "Seconds without any progress of a plan after which the executor says that it is not alive; 0: never.",
        parse=non_negative_seconds,
    )
    cpu_kernels: str = setting(
        "auto",
        "On CPUs: our own kernels (GGUF weights of the Llama shape, kept packed) or torch; auto: ours where they fit, "
        "unless --dtype or --attention-backend are set.",
        choices=("auto", "native", "torch"),
    )
    attention_backend: str = setting(
        "auto", "How attention is computed; auto: the fastest that fits.", choices=("auto", "torch")
    )


def prepare_environment() -> None:
    """Set what libraries read from the environment when they are imported; call it before torch is.

    Threads that wait sleep instead of spinning: the executor shares its cores with the other stages, and a spinning
    barrier beside a busy process costs more than it saves. Progress bars of downloads stay out of the logs.
    """
    set_default_env("OMP_WAIT_POLICY", "passive")
    set_default_env("HF_HUB_DISABLE_PROGRESS_BARS", "1")
