"""Writes tiny models with random weights, so that tests can run the real code on many families in milliseconds.

A folder written here is what a user's model folder is: config, safetensors, generation config, a byte-level BPE
tokenizer that encodes any text, and a ChatML template. Weights depend on family and seed alone.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Literal

Family = Literal["llama", "qwen3", "gpt2"]

FAMILIES: tuple[Family, ...] = ("llama", "qwen3", "gpt2")
VOCAB_SIZE = 512
MAX_POSITION_EMBEDDINGS = 1024
SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
EOS_TOKEN_ID = SPECIAL_TOKENS.index("<|im_end|>")
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)

_CORPUS = """
The tokenizer turns text into tokens and the scheduler weaves the running requests into one batch. Every step
gives each
request the tokens that it still has to compute under the token budget, running requests first and prompts in
chunks.
A block of memory holds the keys and values of sixteen tokens. When a block is full its hash is known and
another request
with the same prefix may share it. The capital of France is Paris, the capital of Italy is Rome, and the river
Thames
flows through London. How are you today? I am fine, thank you. What would you like to know about the weather,
the moon,
the stars, the mountains or the sea? Write a short story about a brave little fox who wanted to learn
mathematics.
Numbers: 0 1 2 3 4 5 6 7 8 9 10 11 12 100 1000 2026. {"name": "value", "list": [true, false, null]} def
main(): return 0
Käse, Straße, naïve café, señor, 你好, 世界, здравствуй, мир, 😀 👍 and so on and so forth, until the very end of
the text.
""".strip()


def write_tiny_model(
    folder: Path, family: Family, seed: int = 0, *, max_positions: int = MAX_POSITION_EMBEDDINGS
) -> Path:
    """Write a complete model folder of `family` with random weights and return it.

    The folder is made if it is missing. Two layers, 64 wide, 512 tokens of vocabulary, fp32 weights of under 1 MB.
    """
    import torch
    import transformers

    folder.mkdir(parents=True, exist_ok=True)
    write_tiny_tokenizer(folder)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = make_tiny_model(family, max_positions)
    ids = {"bos_token_id": 0, "eos_token_id": EOS_TOKEN_ID, "pad_token_id": 0}
    model.generation_config = transformers.GenerationConfig.from_dict(ids)
    model.save_pretrained(folder)
    return folder


def make_tiny_model(family: Family, max_positions: int = MAX_POSITION_EMBEDDINGS) -> Any:
    """Build a tiny causal LM of `family` in memory, in evaluation mode; weights follow torch's global seed."""
    import transformers

    # Weights this wide give logits with clear winners, so that greedy decoding does not hang on rounding.
    common: dict[str, Any] = {
        "vocab_size": VOCAB_SIZE,
        "initializer_range": 0.2,
        "bos_token_id": 0,
        "eos_token_id": EOS_TOKEN_ID,
        "pad_token_id": 0,
    }
    sizes: dict[str, Any] = {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": max_positions,
    }
    gpt2_sizes: dict[str, Any] = {"n_positions": max_positions, "n_embd": 64, "n_layer": 2, "n_head": 4}
    model: Any
    if family == "gpt2":
        model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**gpt2_sizes, **common))
    elif family == "llama":
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, **common))
    else:
        model = transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**sizes, **common))
    return model.eval()


def write_tiny_tokenizer(folder: Path) -> None:
    """Write tokenizer.json and tokenizer_config.json (with the chat template) into `folder`; needs no torch."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_CORPUS.splitlines(), trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": SPECIAL_TOKENS[0],
        "eos_token": SPECIAL_TOKENS[2],
        "pad_token": SPECIAL_TOKENS[0],
        "model_max_length": MAX_POSITION_EMBEDDINGS,
        "chat_template": CHAT_TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2))
