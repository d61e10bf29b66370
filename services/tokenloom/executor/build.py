"""Puts an executor together: model files, load gate, attention backend, KV budget, runner."""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass

import torch

from tokenloom.common.errors import SetupError
from tokenloom.common.model_files import ModelSource, resolve_model
from tokenloom.executor.attention import AttentionBackend, AttentionTraits
from tokenloom.executor.attention_torch import TorchAttention
from tokenloom.executor.capabilities import Capabilities, default_sampling, eos_token_ids, model_len, own_model_len
from tokenloom.executor.config import ExecutorConfig
from tokenloom.executor.forward import ForwardPass, TorchForward
from tokenloom.executor.gate import ModelRefused, check_architecture, record_layout
from tokenloom.executor.kv_cache import block_bytes, max_num_blocks
from tokenloom.executor.model import PagedModel
from tokenloom.executor.model_loader import LoadOptions, choose_device, choose_dtype, load_causal_lm
from tokenloom.executor.native.build import NativeUnavailable, build_native
from tokenloom.executor.plan import SamplingParams
from tokenloom.executor.row_checks import Limits
from tokenloom.executor.runner import Runner, RunnerParts
from tokenloom.executor.sampler import Sampler
from tokenloom.executor.servicer import Loaded
from tokenloom.executor.verdict import require_probe

log = logging.getLogger(__name__)
_BACKENDS: tuple[type[TorchAttention], ...] = (TorchAttention,)
"""In order of preference."""


@dataclass(frozen=True)
class _Built:
    """A forward pass, and what is known of its model."""

    forward: ForwardPass
    vocab_size: int
    own_max_len: int | None
    eos_token_ids: tuple[int, ...]
    default_sampling: SamplingParams
    batch_invariant: bool
    description: str


def build_executor(config: ExecutorConfig) -> Loaded:
    """Load a model and everything around it; takes seconds, or a minute if a GGUF file has to be converted.

    Raises: SetupError, one line, if the model is missing, broken, or not one that can be served.
    """
    torch.set_num_threads(config.num_threads or len(os.sched_getaffinity(0)))
    source = resolve_model(config.model)
    device = choose_device(config.device)
    try:
        built = _build_native(config, source, device) or _build_torch(config, source, device)
    except ModelRefused as refusal:
        raise SetupError(f"model {source.model_id} cannot be served: {refusal}") from None
    bytes_per_block = block_bytes(built.forward.shapes, config.block_size, built.forward.kv_dtype)
    num_blocks = max_num_blocks(config.kv_cache_bytes, bytes_per_block)
    limits = Limits(
        vocab_size=built.vocab_size,
        max_model_len=model_len(built.own_max_len, config.max_model_len),
        block_size=config.block_size,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
    )
    runner = Runner(RunnerParts(built.forward, Sampler(built.eos_token_ids), limits, num_blocks))
    capabilities = Capabilities(
        model_id=source.model_id,
        tokenizer_fingerprint=source.tokenizer_fingerprint(),
        limits=limits,
        max_num_blocks=num_blocks,
        block_bytes=bytes_per_block,
        batch_invariant=built.batch_invariant,
        eos_token_ids=built.eos_token_ids,
        default_sampling=built.default_sampling,
        description=built.description,
    )
    log.info("%s; %d blocks of %d tokens", capabilities.description, num_blocks, config.block_size)
    return Loaded(runner, capabilities)


def _build_native(config: ExecutorConfig, source: ModelSource, device: torch.device) -> _Built | None:
    """The fast path; None if torch shall serve.

    Raises: SetupError if the fast path is demanded and cannot be had, or the model's files are broken.
    """
    is_asked_for_torch = config.dtype != "auto" or config.attention_backend != "auto"
    if config.cpu_kernels == "torch" or (config.cpu_kernels == "auto" and is_asked_for_torch):
        return None
    try:
        if device.type != "cpu":
            raise NativeUnavailable(f"they are for CPUs, and the device is {device}")
        native = build_native(config, source)
    except (NativeUnavailable, ModelRefused) as reason:
        if config.cpu_kernels == "native":
            raise SetupError(f"--cpu-kernels native: {reason}") from None
        level = logging.INFO if isinstance(reason, NativeUnavailable) else logging.WARNING
        log.log(level, "torch serves %s instead of our own kernels: %s", source.model_id, reason)
        return None
    facts, forward = native.facts, native.forward
    return _Built(
        forward,
        forward.shape.vocab_size,
        facts.max_model_len,
        facts.eos_token_ids,
        facts.default_sampling,
        batch_invariant=True,
        description=f"cpu, {native.weights}, {torch.get_num_threads()} threads, kernels {native.isa}",
    )


def _build_torch(config: ExecutorConfig, source: ModelSource, device: torch.device) -> _Built:
    """transformers' model with our attention. Raises: SetupError; ModelRefused."""
    dtype = choose_dtype(config.dtype, device)
    log.info("loading %s as %s on %s", source.model_id, _name(dtype), device)
    if dtype is not choose_dtype("auto", device):
        log.warning("%s is not the dtype that this machine is fastest in; --dtype auto would take it", _name(dtype))
    causal_lm = load_causal_lm(source, LoadOptions(device, dtype))
    eos_ids, sampling, own_max_len = eos_token_ids(causal_lm), default_sampling(causal_lm), own_model_len(causal_lm)
    check_architecture(causal_lm)
    model = PagedModel(causal_lm)
    layout = record_layout(model)
    backend = choose_backend(config.attention_backend, layout.traits(model, config.block_size))
    require_probe(source, model, backend, layout, config.block_size)
    return _Built(
        TorchForward(model, layout, backend),
        model.vocab_size,
        own_max_len,
        eos_ids,
        sampling,
        batch_invariant=backend.batch_invariant,
        description=f"{device}, {_name(dtype)}, {torch.get_num_threads()} threads, attention {backend.name}",
    )


def choose_backend(name: str, traits: AttentionTraits) -> AttentionBackend:
    """The named backend, or for `auto` the first that fits.

    Raises: ModelRefused with every reason if none does.
    """
    reasons = []
    for backend in (cls() for cls in _BACKENDS if name in ("auto", cls.name)):
        is_supported, reason = backend.supports(traits)
        if is_supported:
            return backend
        reasons.append(f"{backend.name}: {reason}")
    raise ModelRefused(f"no attention backend fits ({'; '.join(reasons)})")


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
