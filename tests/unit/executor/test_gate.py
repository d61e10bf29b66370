"""The load gate: which models pass, and why the others do not."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from tokenloom.common.config import cache_root
from tokenloom.common.model_files import ModelSource
from tokenloom.executor import verdict
from tokenloom.executor.attention import AttentionTraits, LayerAttention, StepMetadata
from tokenloom.executor.attention_torch import TorchAttention
from tokenloom.executor.build import choose_backend
from tokenloom.executor.gate import ModelLayout, ModelRefused, check_architecture, record_layout
from tokenloom.executor.model import PagedModel
from tokenloom.executor.probe import ModelDiverges, probe, worst_divergence

SMALL: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "initializer_range": 0.3,
    "pad_token_id": 0,
    "bos_token_id": 0,
    "eos_token_id": 1,
}


def pass_gate(causal_lm: Any, block_size: int = 16) -> ModelLayout:
    check_architecture(causal_lm)
    model = PagedModel(causal_lm)
    layout = record_layout(model)
    probe(model, choose_backend("auto", layout.traits(model, block_size)), layout, block_size)
    return layout


def make(config: Any) -> Any:
    torch.manual_seed(1)
    auto: Any = transformers.AutoModelForCausalLM
    return auto.from_config(config).eval()


@pytest.mark.parametrize("block_size", [1, 4, 16])
def test_tiny_models_of_the_three_families_pass(tiny_causal_lm: Any, block_size: int) -> None:
    layout = pass_gate(tiny_causal_lm, block_size)
    assert [layer.index for layer in layout.layers] == [0, 1]


def test_a_model_passes_in_bfloat16(tiny_causal_lm: Any) -> None:
    pass_gate(tiny_causal_lm.to(torch.bfloat16))


@pytest.mark.parametrize(
    ("config", "window", "softcap"),
    [
        (transformers.MistralConfig(**SMALL, sliding_window=6), 6, None),
        (transformers.Gemma2Config(**SMALL, head_dim=8, sliding_window=6, attn_logit_softcapping=2.0), 6, 2.0),
        (transformers.Phi3Config(**SMALL, sliding_window=None), None, None),
        (transformers.GPTNeoXConfig(**SMALL), None, None),
        (transformers.OPTConfig(**SMALL, ffn_dim=48, word_embed_proj_dim=32), None, None),
        (transformers.CohereConfig(**SMALL), None, None),
        (
            transformers.Qwen3MoeConfig(**SMALL, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16),
            None,
            None,
        ),
    ],
    ids=lambda value: getattr(value, "model_type", ""),
)
def test_other_families_pass_with_what_their_layers_ask_for(
    config: Any, window: int | None, softcap: float | None
) -> None:
    layout = pass_gate(make(config))
    assert window in {layer.sliding_window for layer in layout.layers}
    assert softcap in {layer.softcap for layer in layout.layers}


def test_attention_sinks_pass() -> None:
    config = transformers.GptOssConfig(**SMALL, head_dim=8, num_local_experts=2, num_experts_per_tok=1)
    causal_lm = make(config)
    for layer in causal_lm.model.layers:
        torch.nn.init.normal_(layer.self_attn.sinks)
    assert pass_gate(causal_lm).has_sinks


@pytest.mark.parametrize(
    ("config", "why"),
    [
        (transformers.BloomConfig(vocab_size=96, hidden_size=32, n_layer=2, n_head=4), "attention interface"),
        (
            transformers.FalconConfig(
                vocab_size=96, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, alibi=True
            ),
            "attention interface",
        ),
        (transformers.MptConfig(vocab_size=96, d_model=32, n_layers=2, n_heads=4), "attention interface"),
        (
            transformers.GPTNeoConfig(
                vocab_size=96, hidden_size=32, num_layers=2, num_heads=4, attention_types=[[["global", "local"], 1]]
            ),
            "attention interface",
        ),
        (transformers.MambaConfig(vocab_size=96, hidden_size=32, num_hidden_layers=2), "recurrent state"),
    ],
    ids=lambda value: getattr(value, "model_type", ""),
)
def test_models_that_would_be_wrong_in_silence_are_refused_with_the_reason(config: Any, why: str) -> None:
    with pytest.raises(ModelRefused, match=why):
        check_architecture(make(config))


@pytest.mark.parametrize("rope_type", ["dynamic", "longrope"])
def test_rope_whose_angles_depend_on_the_batch_is_refused(rope_type: str) -> None:
    causal_lm = make(transformers.LlamaConfig(**SMALL))
    causal_lm.config.rope_parameters = {"full_attention": {"rope_type": rope_type, "factor": 2.0}}
    with pytest.raises(ModelRefused, match=f"rope type {rope_type}"):
        check_architecture(causal_lm)


def test_unknown_layer_types_are_refused() -> None:
    causal_lm = make(transformers.LlamaConfig(**SMALL))
    causal_lm.config.layer_types = ["full_attention", "linear_attention"]
    with pytest.raises(ModelRefused, match="linear_attention"):
        check_architecture(causal_lm)


def test_a_layer_that_bypasses_paged_attention_is_refused(tiny_causal_lm: Any) -> None:
    model = PagedModel(tiny_causal_lm)
    blocks = tiny_causal_lm.transformer.h if hasattr(tiny_causal_lm, "transformer") else tiny_causal_lm.model.layers
    del blocks[1]
    with pytest.raises(ModelRefused, match="2 layers and attention was called for layers \\[0\\]"):
        record_layout(model)


def test_the_probe_refuses_a_backend_that_computes_something_else(tiny_causal_lm: Any) -> None:
    class OffByOne(TorchAttention):
        def attend(
            self, query: Tensor, k_cache: Tensor, v_cache: Tensor, prepared: Any, layer: LayerAttention
        ) -> Tensor:
            return super().attend(query, k_cache, v_cache.roll(1, dims=1), prepared, layer)

    model = PagedModel(tiny_causal_lm)
    with pytest.raises(ModelDiverges, match="other results"):
        probe(model, OffByOne(), record_layout(model), 16)


class ShiftedDecodeTables(TorchAttention):
    """Right for chunks and for one decode row; two decode rows read each other's keys."""

    def prepare(self, metadata: StepMetadata) -> Any:
        table = metadata.block_table.clone()
        table[: metadata.num_decode] = table[: metadata.num_decode].roll(1, dims=0)
        return super().prepare(replace(metadata, block_table=table))


class ForgetsTheLastDecodeKey(TorchAttention):
    """Right for chunks; a decode row does not see the token before its own."""

    def prepare(self, metadata: StepMetadata) -> Any:
        table, size = metadata.block_table.clone(), metadata.block_size
        for row in range(metadata.num_decode):
            hidden = (metadata.seq_lens[row] - 2) // size
            table[row, hidden] = table[row, 0]
        return super().prepare(replace(metadata, block_table=table))


class WithoutWindow(TorchAttention):
    """Looks behind the window."""

    def attend(self, query: Tensor, k_cache: Tensor, v_cache: Tensor, prepared: Any, layer: LayerAttention) -> Tensor:
        return super().attend(query, k_cache, v_cache, prepared, replace(layer, sliding_window=None))


class WindowOffByOne(TorchAttention):
    """A query sees one key less than it should."""

    def attend(self, query: Tensor, k_cache: Tensor, v_cache: Tensor, prepared: Any, layer: LayerAttention) -> Tensor:
        assert layer.sliding_window is not None
        narrower = replace(layer, sliding_window=layer.sliding_window - 1)
        return super().attend(query, k_cache, v_cache, prepared, narrower)


class ReadsUnwrittenMemory(TorchAttention):
    """Takes a little of what no row has written."""

    def attend(self, query: Tensor, k_cache: Tensor, v_cache: Tensor, prepared: Any, layer: LayerAttention) -> Tensor:
        return super().attend(query, k_cache, v_cache, prepared, layer) + 0.0 * v_cache[0].sum()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("backend", [ShiftedDecodeTables, ForgetsTheLastDecodeKey, ReadsUnwrittenMemory])
def test_the_probe_sees_faults_of_decode_rows_and_of_unwritten_memory(
    tiny_causal_lm: Any, backend: type[TorchAttention], dtype: torch.dtype
) -> None:
    model = PagedModel(tiny_causal_lm.to(dtype))
    with pytest.raises(ModelDiverges, match="other results"):
        probe(model, backend(), record_layout(model), 1)


@pytest.mark.parametrize("backend", [WithoutWindow, WindowOffByOne])
def test_the_probe_sees_faults_of_a_window_that_is_longer_than_its_rows(backend: type[TorchAttention]) -> None:
    config = transformers.MistralConfig(**SMALL, sliding_window=100)
    model = PagedModel(make(config))
    layout = record_layout(model)
    with pytest.raises(ModelDiverges, match="other results"):
        probe(model, backend(), layout, 16)
    probe(model, TorchAttention(), layout, 16)
    assert model.config.sliding_window == 100, "the model keeps its own window"


def test_one_wrong_position_is_not_averaged_away() -> None:
    generator = torch.Generator().manual_seed(3)
    plain = torch.randn(40, 96, generator=generator)
    assert worst_divergence(plain, plain) == 0.0
    wrong = plain.clone()
    wrong[33] += 0.02 * torch.randn(96, generator=generator)
    alone = worst_divergence(plain[33:34], wrong[33:34])
    assert alone > 1e-4
    assert worst_divergence(plain, wrong) == pytest.approx(alone)
    wrong[5, 0] = torch.nan
    assert worst_divergence(plain, wrong) == torch.inf


def test_no_backend_that_fits_is_a_refusal_with_the_backends_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TorchAttention, "supports", lambda *_: (False, "not on Mondays"))
    traits = AttentionTraits("cpu", torch.float32, frozenset({(8, 8)}), 16)
    with pytest.raises(ModelRefused, match="torch: not on Mondays"):
        choose_backend("auto", traits)


def test_a_verdict_is_remembered_per_weights_and_a_refusal_too(
    llama_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    causal_lm: Any = transformers.AutoModelForCausalLM.from_pretrained(llama_folder)
    model = PagedModel(causal_lm.eval())
    layout, backend = record_layout(model), TorchAttention()
    source = ModelSource("tiny", llama_folder)
    verdict.require_probe(source, model, backend, layout, 16)
    (file,) = cache_root().glob("gate/*/verdict.json")
    assert json.loads(file.read_text())["refusal"] == ""

    def refuse(*_: Any) -> float:
        raise ModelDiverges("it is not itself")

    monkeypatch.setattr(verdict, "probe", refuse)
    verdict.require_probe(source, model, backend, layout, 16)  # known good: not probed again
    for _ in range(2):
        with pytest.raises(ModelRefused, match="not itself"):
            verdict.require_probe(source, model, backend, layout, 4)
        monkeypatch.setattr(verdict, "probe", lambda *_: 0.0)  # known bad: not probed again


def test_a_refusal_whose_cause_may_pass_is_not_remembered(llama_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    causal_lm: Any = transformers.AutoModelForCausalLM.from_pretrained(llama_folder)
    model = PagedModel(causal_lm.eval())
    layout, backend = record_layout(model), TorchAttention()
    source = ModelSource("tiny", llama_folder)

    def out_of_memory(*_: Any) -> Tensor:
        raise RuntimeError("not enough memory: you tried to allocate 12 GB")

    with monkeypatch.context() as patch:
        patch.setattr(PagedModel, "plain_logits", out_of_memory)
        with pytest.raises(ModelRefused, match="not enough memory"):
            verdict.require_probe(source, model, backend, layout, 16)
    verdict.require_probe(source, model, backend, layout, 16)
