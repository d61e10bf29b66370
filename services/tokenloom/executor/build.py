"""Puts an executor together: model files, load gate, attention backend, KV budget, runner."""

from __future__ import annotations

import logging
import os

import torch

from tokenloom.common.errors import SetupError
from tokenloom.common.model_files import resolve_model
from tokenloom.executor.attention import AttentionBackend, AttentionTraits
from tokenloom.executor.attention_torch import TorchAttention
from tokenloom.executor.capabilities import Capabilities, default_sampling, eos_token_ids, model_len
from tokenloom.executor.config import ExecutorConfig
from tokenloom.executor.gate import ModelRefused, check_architecture, record_layout
from tokenloom.executor.kv_cache import block_bytes, max_num_blocks
from tokenloom.executor.model import PagedModel
from tokenloom.executor.model_loader import LoadOptions, choose_device, choose_dtype, load_causal_lm
from tokenloom.executor.row_checks import Limits
from tokenloom.executor.runner import Runner, RunnerParts
from tokenloom.executor.sampler import Sampler
from tokenloom.executor.servicer import Loaded
from tokenloom.executor.verdict import require_probe

log = logging.getLogger(__name__)
_BACKENDS: tuple[type[TorchAttention], ...] = (TorchAttention,)
"""In order of preference."""


def build_executor(config: ExecutorConfig) -> Loaded:
    """Load a model and everything around it; takes seconds, or a minute if a GGUF file has to be converted.

    Raises: SetupError, one line, if the model is missing, broken, or not one that can be served.
    """
    torch.set_num_threads(config.num_threads or len(os.sched_getaffinity(0)))
    source = resolve_model(config.model)
    device = choose_device(config.device)
    dtype = choose_dtype(config.dtype, device)
    log.info("loading %s as %s on %s", source.model_id, _name(dtype), device)
    if dtype is not choose_dtype("auto", device):
        log.warning("%s is not the dtype that this machine is fastest in; --dtype auto would take it", _name(dtype))
    causal_lm = load_causal_lm(source, LoadOptions(device, dtype))
    max_model_len = model_len(causal_lm, config.max_model_len)
    eos_ids, sampling = eos_token_ids(causal_lm), default_sampling(causal_lm)
    try:
        check_architecture(causal_lm)
        model = PagedModel(causal_lm)
        layout = record_layout(model)
        backend = choose_backend(config.attention_backend, layout.traits(model, config.block_size))
        require_probe(source, model, backend, layout, config.block_size)
    except ModelRefused as refusal:
        raise SetupError(f"model {source.model_id} cannot be served: {refusal}") from None
    bytes_per_block = block_bytes(layout.shapes, config.block_size, dtype)
    num_blocks = max_num_blocks(config.kv_cache_bytes, bytes_per_block)
    limits = Limits(
        vocab_size=model.vocab_size,
        max_model_len=max_model_len,
        block_size=config.block_size,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
    )
    runner = Runner(RunnerParts(model, layout, backend, Sampler(eos_ids), limits, num_blocks))
    capabilities = Capabilities(
        model_id=source.model_id,
        tokenizer_fingerprint=source.tokenizer_fingerprint(),
        limits=limits,
        max_num_blocks=num_blocks,
        block_bytes=bytes_per_block,
        batch_invariant=backend.batch_invariant,
        eos_token_ids=eos_ids,
        default_sampling=sampling,
        description=f"{device}, {_name(dtype)}, {torch.get_num_threads()} threads, attention {backend.name}",
    )
    log.info("%s; %d blocks of %d tokens", capabilities.description, num_blocks, config.block_size)
    return Loaded(runner, capabilities)


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
