"""From a model's files to a transformers causal LM, quietly.

A folder with safetensors is loaded as it is, memory-mapped. A GGUF file is dequantised once, through transformers, and
kept as bf16 safetensors in the cache; later starts load those. Dequantised fp32 values do not fit into bf16, so the
cached weights, not the GGUF's own values, are the model: fp32 runs compute with the same bf16-rounded weights as bf16
runs, and a reference for either is made from the cached folder.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import logging
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tokenloom.common.errors import SetupError
from tokenloom.common.model_files import ModelSource, cached_dir

log = logging.getLogger(__name__)
_IMPORTING = threading.Lock()
_CONVERSION = "gguf-bf16-1"
_DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


@dataclass(frozen=True)
class LoadOptions:
    """How to load: device and dtype as they were resolved by `choose_device` and `choose_dtype`."""

    device: torch.device
    dtype: torch.dtype


def choose_device(name: str) -> torch.device:
    """The device that `auto`, `cpu` or `cuda` means here.

    Raises: SetupError if cuda is asked for and torch sees no GPU.
    """
    if name == "cuda" and not torch.cuda.is_available():
        raise SetupError("--device cuda: torch sees no GPU; install a CUDA build of torch or use --device cpu")
    if name == "cuda" or (name == "auto" and torch.cuda.is_available()):
        return torch.device("cuda")
    return torch.device("cpu")


def choose_dtype(name: str, device: torch.device) -> torch.dtype:
    """The dtype that `auto`, `bfloat16` or `float32` means on a device.

    `auto` is bf16 on GPUs and on CPUs with bf16 dot products (AVX512_BF16, AMX). On other CPUs torch has no fast bf16
    matrix product for more than one row. Measured with SmolLM2-135M and AVX2 alone, time of a step in bf16 over fp32:
    0.6 with 1 row (it reads half the bytes), 12 with 16 rows, 16 with 32, so fp32 is the default there.
    """
    if name != "auto":
        return _DTYPES[name]
    return torch.bfloat16 if device.type == "cuda" or _cpu_has_bf16() else torch.float32


def load_causal_lm(source: ModelSource, options: LoadOptions) -> Any:
    """Load a model in evaluation mode.

    Raises: SetupError, one line, if the files are incomplete or broken.
    """
    _hush_transformers()
    started = time.perf_counter()
    with ThreadPoolExecutor(1) as helper:
        folder = helper.submit(weights_folder, source)  # hashes cached weights while this thread imports
        _import_modeling()
    causal_lm = _from_folder(folder.result(), options.dtype)
    # A GPU copies the weights; on the CPU this does nothing.
    causal_lm = causal_lm.to(options.device).eval().requires_grad_(False)
    log.info("loaded %s in %.1f s", source.model_id, time.perf_counter() - started)
    return causal_lm


def weights_folder(source: ModelSource) -> Path:
    """The folder of safetensors that is really loaded; a GGUF file is converted on first use.

    Raises: SetupError if it cannot be converted.
    """
    if source.gguf_file is None:
        return source.folder
    _hush_transformers()
    key = hashlib.sha256(f"{_CONVERSION}\0{source.weights_fingerprint()}".encode()).hexdigest()
    return cached_dir("weights", key, lambda folder: _convert_gguf(source, folder))


def _convert_gguf(source: ModelSource, folder: Path) -> None:
    """Dequantise a GGUF file and save it as bf16 safetensors."""
    _import_modeling()
    log.info("converting %s, once; this takes a minute", source.gguf_file)
    path = source.folder / str(source.gguf_file)
    try:
        # The GGUF reader draws a progress bar that no setting turns off; log handlers keep their own stream.
        with contextlib.redirect_stderr(io.StringIO()):
            causal_lm = _auto_model().from_pretrained(
                str(source.folder),
                gguf_file=source.gguf_file,
                dtype=torch.float32,
                local_files_only=True,
                **_unpacked(),
            )
    except Exception as error:  # the readers of GGUF raise whatever a broken file trips over
        raise SetupError(f"{path} cannot be read as a model ({_first_line(error)}); download it again") from error
    # It was unpacked while loading; what is saved is an ordinary model.
    causal_lm.hf_quantizer = None
    if hasattr(causal_lm.config, "quantization_config"):
        del causal_lm.config.quantization_config
    causal_lm.to(torch.bfloat16).save_pretrained(str(folder))


def _from_folder(folder: Path, dtype: torch.dtype) -> Any:
    if not any(folder.glob("*.safetensors")):
        raise SetupError(f"{folder} holds no weights (*.safetensors); download the model again or give another --model")
    try:
        causal_lm, report = _auto_model().from_pretrained(
            str(folder), dtype=dtype, local_files_only=True, output_loading_info=True, use_safetensors=True
        )
    except Exception as error:  # a broken file may raise nearly anything
        raise SetupError(f"{folder} cannot be loaded as a model ({_first_line(error)}); download it again") from error
    if missing := sorted(report["missing_keys"]):
        raise SetupError(f"{folder} lacks {len(missing)} weights, {missing[0]} among them; download the model again")
    return causal_lm


def _import_modeling() -> None:
    """Import what loading needs of transformers: seconds of work. Two threads must not do it at once."""
    with _IMPORTING:
        import transformers.modeling_utils  # noqa: F401


def _auto_model() -> Any:
    """transformers' AutoModelForCausalLM, untyped: its annotations promise less than it does."""
    import transformers

    return transformers.AutoModelForCausalLM


def _unpacked() -> dict[str, Any]:
    """Options that make transformers dequantise a GGUF file; newer releases would keep some families packed."""
    import transformers

    gguf_config: Any = getattr(transformers, "GgufConfig", None)
    return {} if gguf_config is None else {"quantization_config": gguf_config(dequantize=True)}


def _cpu_has_bf16() -> bool:
    """Whether this CPU multiplies bf16 numbers natively."""
    try:
        flags = Path("/proc/cpuinfo").read_text()
    except OSError:
        return False
    return "avx512_bf16" in flags or "amx_bf16" in flags


def _hush_transformers() -> None:
    """Silence progress bars and advice; what matters is raised or logged here."""
    import transformers.utils.logging

    chatter: Any = transformers.utils.logging
    chatter.set_verbosity_error()
    chatter.disable_progress_bar()


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0][:200] if lines else type(error).__name__
