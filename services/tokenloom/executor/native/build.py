"""Puts the fast path together for a model that it can serve, or says why not.

What transformers knows of the model (end tokens, sampling defaults, longest sequence) is asked once, together with the
probe, and kept with its verdict; later starts import no transformers.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import logging
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tokenloom import __version__
from tokenloom.common.errors import SetupError
from tokenloom.common.gguf_file import GgufError, GgufFile
from tokenloom.common.model_files import ModelSource, cached_dir
from tokenloom.executor.capabilities import default_sampling, eos_token_ids, own_model_len
from tokenloom.executor.config import ExecutorConfig
from tokenloom.executor.gate import ModelRefused
from tokenloom.executor.model_loader import LoadOptions, load_causal_lm
from tokenloom.executor.native.gguf_weights import GgufWeights
from tokenloom.executor.native.library import LibraryMissing, Pool, load_library
from tokenloom.executor.native.llama import NativeLlama
from tokenloom.executor.native.probe import MAX_KL, MAX_MEAN_KL, probe_divergence
from tokenloom.executor.native.weights import UnsupportedWeights
from tokenloom.executor.plan import SamplingParams
from tokenloom.executor.verdict import code_digest, cpu_flags

log = logging.getLogger(__name__)
_FILE = "verdict.json"
_LANES = 16
_FAST_ISAS = frozenset({"avx512-vnni", "avx2"})


class NativeUnavailable(Exception):
    """The fast path cannot serve this; the message says why."""


@dataclass(frozen=True)
class ModelFacts:
    """What a model's configuration says besides its shape."""

    eos_token_ids: tuple[int, ...]
    default_sampling: SamplingParams
    max_model_len: int


@dataclass(frozen=True)
class NativeModel:
    """A model that is ready, and what is known of it."""

    forward: NativeLlama
    facts: ModelFacts
    weights: str
    isa: str


def build_native(config: ExecutorConfig, source: ModelSource) -> NativeModel:
    """Load a model for the kernels.

    Raises: NativeUnavailable if this machine, the settings or the model are not made for it; ModelRefused if the probe
        says that the results differ.
    """
    if source.gguf_file is None:
        raise NativeUnavailable("the weights are not in a GGUF file")
    if config.block_size % _LANES:
        raise NativeUnavailable(f"--block-size {config.block_size} is not a multiple of {_LANES}")
    try:
        isa = load_library().tl_isa().decode()
        if isa not in _FAST_ISAS:
            raise NativeUnavailable("this CPU has neither AVX2 nor AVX512")
        weights = GgufWeights(GgufFile(source.folder / source.gguf_file))
        pool = Pool(config.num_threads or len(os.sched_getaffinity(0)))
        forward = NativeLlama(pool, weights.shape, weights, torch.bfloat16)
    except (LibraryMissing, UnsupportedWeights) as error:
        raise NativeUnavailable(str(error)) from None
    except (GgufError, OSError) as error:
        path = source.folder / source.gguf_file
        raise SetupError(f"{path} cannot be read as a model ({error}); download it again") from None
    return NativeModel(forward, _facts(config, source, forward, isa), forward.weights_name, isa)


def _facts(config: ExecutorConfig, source: ModelSource, forward: NativeLlama, isa: str) -> ModelFacts:
    """The model's facts, once the probe was passed."""

    def build(folder: Path) -> None:
        causal_lm = load_causal_lm(source, LoadOptions(torch.device("cpu"), torch.float32))
        mean, worst = probe_divergence(forward, causal_lm, config.block_size)
        log.info("the fast path differs from transformers by KL %.3g (mean), %.3g (worst)", mean, worst)
        (folder / _FILE).write_text(json.dumps({"mean": mean, "worst": worst, "facts": _facts_of(causal_lm)}))

    verdict = json.loads((cached_dir("gate", _key(config, source, isa), build) / _FILE).read_text())
    if not (verdict["mean"] <= MAX_MEAN_KL and verdict["worst"] <= MAX_KL):
        raise ModelRefused(
            f"the fast path gives other results than transformers (KL {verdict['mean']:.3g} on average, "
            f"{verdict['worst']:.3g} at worst)"
        )
    facts = verdict["facts"]
    return ModelFacts(
        tuple(facts["eos_token_ids"]), SamplingParams(**facts["default_sampling"]), int(facts["max_model_len"])
    )


def _facts_of(causal_lm: Any) -> dict[str, Any]:
    sampling = default_sampling(causal_lm)
    neutral = SamplingParams()
    chosen = {
        field.name: getattr(sampling, field.name)
        for field in dataclasses.fields(sampling)
        if getattr(sampling, field.name) != getattr(neutral, field.name)
    }
    return {
        "eos_token_ids": eos_token_ids(causal_lm),
        "default_sampling": chosen,
        "max_model_len": own_model_len(causal_lm) or 0,
    }


def _key(config: ExecutorConfig, source: ModelSource, isa: str) -> str:
    """Digest of everything that the verdict depends on."""
    library = hashlib.sha256(Path(load_library()._name).read_bytes()).hexdigest()
    parts = ["native", source.weights_fingerprint(), __version__, code_digest(), library, isa]
    parts += [str(torch.__version__), str(config.block_size), cpu_flags()]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()
