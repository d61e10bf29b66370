"""Loading: safetensors as they are, GGUF once, and one clear line when it cannot work."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch

from tests.tiny_models import EOS_TOKEN_ID
from tokenloom.common.errors import SetupError
from tokenloom.common.model_files import ModelSource, resolve_model
from tokenloom.executor import model_loader
from tokenloom.executor.build import build_executor
from tokenloom.executor.capabilities import default_sampling, eos_token_ids, model_len, own_model_len
from tokenloom.executor.config import ExecutorConfig
from tokenloom.executor.model_loader import LoadOptions, choose_device, choose_dtype, load_causal_lm, weights_folder

CPU = torch.device("cpu")
FP32 = LoadOptions(CPU, torch.float32)
HIDDEN, FEED_FORWARD, HEADS, KV_HEADS, VOCAB = 64, 128, 4, 2, 64


@pytest.fixture
def folder(llama_folder: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(llama_folder, tmp_path / "model"))


@pytest.fixture
def gguf_path(tmp_path: Path) -> Path:
    """A Llama of one layer with quantised weights, as llama.cpp writes them."""
    (tmp_path / "gguf").mkdir()
    path = tmp_path / "gguf" / "tiny.gguf"
    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_block_count(1)
    writer.add_context_length(128)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(FEED_FORWARD)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(VOCAB)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list([f"t{i}" for i in range(VOCAB)])
    writer.add_eos_token_id(EOS_TOKEN_ID)
    generator = np.random.default_rng(0)
    kv_width = HIDDEN // HEADS * KV_HEADS
    shapes = {
        "token_embd": (VOCAB, HIDDEN),
        "blk.0.attn_q": (HIDDEN, HIDDEN),
        "blk.0.attn_k": (kv_width, HIDDEN),
        "blk.0.attn_v": (kv_width, HIDDEN),
        "blk.0.attn_output": (HIDDEN, HIDDEN),
        "blk.0.ffn_gate": (FEED_FORWARD, HIDDEN),
        "blk.0.ffn_up": (FEED_FORWARD, HIDDEN),
        "blk.0.ffn_down": (HIDDEN, FEED_FORWARD),
    }
    for name, shape in shapes.items():
        weights = generator.standard_normal(shape).astype(np.float32)
        kind = gguf.GGMLQuantizationType.Q8_0
        writer.add_tensor(f"{name}.weight", gguf.quants.quantize(weights, kind), raw_dtype=kind)
    for name in ("blk.0.attn_norm", "blk.0.ffn_norm", "output_norm"):
        writer.add_tensor(f"{name}.weight", np.ones(HIDDEN, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_a_folder_loads_in_both_dtypes_with_the_same_weights(folder: Path) -> None:
    source = resolve_model(str(folder))
    fp32 = load_causal_lm(source, FP32)
    bf16 = load_causal_lm(source, LoadOptions(CPU, torch.bfloat16))
    assert {p.dtype for p in fp32.parameters()} == {torch.float32}
    assert {p.dtype for p in bf16.parameters()} == {torch.bfloat16}
    for a, b in zip(fp32.parameters(), bf16.parameters(), strict=True):
        assert torch.equal(a.to(torch.bfloat16), b)
    assert not fp32.training


def test_a_gguf_file_is_converted_once_and_both_dtypes_run_on_the_cached_weights(
    gguf_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = resolve_model(str(gguf_path))
    fp32 = load_causal_lm(source, FP32)
    monkeypatch.setattr(model_loader, "_convert_gguf", lambda *_: pytest.fail("converted twice"))
    bf16 = load_causal_lm(source, LoadOptions(CPU, torch.bfloat16))
    for a, b in zip(fp32.parameters(), bf16.parameters(), strict=True):
        assert torch.equal(a, b.float())
    assert fp32.config.num_key_value_heads == KV_HEADS
    assert not hasattr(fp32.config, "quantization_config")


def test_a_converted_gguf_holds_the_files_own_values(gguf_path: Path) -> None:
    causal_lm = load_causal_lm(resolve_model(str(gguf_path)), FP32)
    tensors = {t.name: t for t in gguf.GGUFReader(str(gguf_path)).tensors}
    stored = tensors["blk.0.ffn_gate.weight"]
    expected = torch.from_numpy(gguf.quants.dequantize(stored.data, stored.tensor_type).copy())
    loaded = causal_lm.model.layers[0].mlp.gate_proj.weight
    assert torch.equal(loaded, expected.to(torch.bfloat16).float())


def test_a_broken_cache_entry_is_converted_again(gguf_path: Path) -> None:
    source = resolve_model(str(gguf_path))
    weights = weights_folder(source) / "model.safetensors"
    good = weights.read_bytes()
    weights.write_bytes(good[:-10])
    assert (weights_folder(source) / "model.safetensors").read_bytes() == good


def test_loading_prints_nothing(folder: Path, gguf_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    for path in (folder, gguf_path):
        load_causal_lm(resolve_model(str(path)), FP32)
    assert capfd.readouterr() == ("", "")


def broken(folder: Path, how: str) -> ModelSource:
    if how == "no weights":
        (folder / "model.safetensors").unlink()
    elif how == "cut short":
        path = folder / "model.safetensors"
        path.write_bytes(path.read_bytes()[:1000])
    elif how == "config is no JSON":
        (folder / "config.json").write_text("{")
    elif how == "unknown model type":
        (folder / "config.json").write_text(json.dumps({"model_type": "abacus"}))
    elif how == "a layer is missing":
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 3}))
    return ModelSource("broken", folder)


@pytest.mark.parametrize(
    "how", ["no weights", "cut short", "config is no JSON", "unknown model type", "a layer is missing"]
)
def test_a_broken_folder_is_one_line_that_says_what_to_do(folder: Path, how: str) -> None:
    source = broken(folder, how)
    with pytest.raises(SetupError, match="download") as failure:
        load_causal_lm(source, FP32)
    assert str(folder) in str(failure.value)
    assert "\n" not in str(failure.value)


@pytest.mark.parametrize("rest", [b"", b"\xff" * 64], ids=["empty", "garbage"])
def test_a_broken_gguf_file_is_one_line_that_says_what_to_do(tmp_path: Path, rest: bytes) -> None:
    path = tmp_path / "broken.gguf"
    path.write_bytes(b"GGUF\x03\x00\x00\x00" + rest)
    with pytest.raises(SetupError, match=r"broken\.gguf cannot be read as a model .* download it again") as failure:
        load_causal_lm(resolve_model(str(path)), FP32)
    assert "\n" not in str(failure.value)


def test_dtype_auto_is_bf16_only_where_the_hardware_computes_in_it(monkeypatch: pytest.MonkeyPatch) -> None:
    for has_bf16, dtype in ((True, torch.bfloat16), (False, torch.float32)):
        monkeypatch.setattr(model_loader, "_cpu_has_bf16", lambda has_bf16=has_bf16: has_bf16)
        assert choose_dtype("auto", CPU) is dtype
    assert choose_dtype("auto", torch.device("cuda")) is torch.bfloat16
    assert choose_dtype("bfloat16", CPU) is torch.bfloat16


def test_cuda_without_a_gpu_is_a_setup_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert choose_device("auto") == CPU
    with pytest.raises(SetupError, match="no GPU"):
        choose_device("cuda")


def test_sampling_defaults_and_end_tokens_come_from_the_generation_config(folder: Path) -> None:
    settings: dict[str, Any] = {"eos_token_id": [9, 2], "temperature": 0.6, "top_k": 20, "do_sample": True}
    (folder / "generation_config.json").write_text(json.dumps(settings))
    causal_lm = load_causal_lm(resolve_model(str(folder)), FP32)
    defaults = default_sampling(causal_lm)
    assert eos_token_ids(causal_lm) == (2, 9)
    assert (defaults.temperature, defaults.top_k, defaults.top_p) == (0.6, 20, 1.0)


def test_a_context_longer_than_the_models_is_refused(folder: Path) -> None:
    causal_lm = load_causal_lm(resolve_model(str(folder)), FP32)
    assert (model_len(own_model_len(causal_lm), 0), model_len(own_model_len(causal_lm), 100)) == (1024, 100)
    with pytest.raises(SetupError, match="2000 is more than the model's own limit of 1024"):
        model_len(own_model_len(causal_lm), 2000)


def config_of(folder: Path, **changes: Any) -> ExecutorConfig:
    from tokenloom.common.config import ProcessSettings

    return ExecutorConfig(ProcessSettings(), model=str(folder), num_threads=1, **changes)


def test_a_built_executor_knows_its_memory(folder: Path) -> None:
    loaded = build_executor(config_of(folder, kv_cache_bytes=1 << 20, dtype="float32"))
    capabilities = loaded.capabilities
    assert capabilities.block_bytes == 2 * 2 * 2 * 16 * 16 * 4  # layers, K and V, KV heads, dims, tokens, bytes
    assert capabilities.max_num_blocks == (1 << 20) // capabilities.block_bytes
    assert (capabilities.limits.vocab_size, capabilities.limits.max_model_len) == (512, 1024)
    assert capabilities.eos_token_ids == (EOS_TOKEN_ID,)


def test_too_little_kv_memory_is_a_setup_error(folder: Path) -> None:
    with pytest.raises(SetupError, match="--kv-cache-bytes 9000 holds 1 blocks"):
        build_executor(config_of(folder, kv_cache_bytes=9000, dtype="float32"))
