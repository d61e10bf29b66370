"""The whole stack says what transformers says about the same weights."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
import transformers

from tests.system.stack import Stack, running_stack
from tests.tiny_models import Family, write_tiny_model
from tokenloom.common.model_files import resolve_model
from tokenloom.executor.model_loader import weights_folder
from tokenloom.tokenizer.assets import load_assets

NEAR_TIE = 1e-3
NUM_OUTPUT = 16
SHARED = "You are a patient teacher of geography who answers every question of a curious pupil in one short sentence. "
SUBJECTS = [
    "rivers",
    "the moon",
    "old maps",
    "a small island",
    "winter",
    "salt",
    "high mountains",
    "Paris",
    "glass",
    "tea",
]
PROMPTS = [
    *(f"{SHARED}Tell me something about {subject}, please." for subject in SUBJECTS),
    *(f"{subject.capitalize()} and what comes of it:" * (1 + i) for i, subject in enumerate(SUBJECTS)),
]


@dataclass
class Reference:
    """transformers' greedy continuation and, for each token, the logit gap between the best and the second best."""

    prompt_ids: list[int]
    token_ids: list[int]
    gaps: list[float]

    def agrees(self, token_ids: list[int]) -> bool:
        """Equal up to the first near tie of the reference."""
        assert len(token_ids) == len(self.token_ids)
        for ours, theirs, gap in zip(token_ids, self.token_ids, self.gaps, strict=True):
            if gap < NEAR_TIE:
                return True
            if ours != theirs:
                return False
        return True


def load(folder: Path, dtype: torch.dtype) -> Any:
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, local_files_only=True)
    model.generation_config = transformers.GenerationConfig.from_dict({"pad_token_id": 0})
    return model.eval()


def references(model: Any, prompts: list[list[int]]) -> list[Reference]:
    """`generate` for all prompts at once, padded on the left, which the mask hides."""
    length = max(map(len, prompts))
    output = model.generate(
        torch.tensor([[0] * (length - len(prompt)) + prompt for prompt in prompts]),
        attention_mask=torch.tensor([[0] * (length - len(prompt)) + [1] * len(prompt) for prompt in prompts]),
        do_sample=False,
        max_new_tokens=NUM_OUTPUT,
        return_dict_in_generate=True,
        output_logits=True,
    )
    token_ids = output.sequences[:, length:].tolist()
    best = torch.stack(output.logits, dim=1).float().topk(2).values
    gaps = (best[..., 0] - best[..., 1]).tolist()
    return [Reference(*of_prompt) for of_prompt in zip(prompts, token_ids, gaps, strict=True)]


def tokenize(model: str, texts: list[str]) -> list[list[int]]:
    """Token ids as the tokenizer stage makes them."""
    tokenizer = load_assets(resolve_model(model)).tokenizer
    return [tokenizer.encode(text).ids for text in texts]


async def greedy(stack: Stack, prompts: list[list[int]], at_a_time: int = 16) -> list[list[int]]:
    """Token ids of greedy continuations, `at_a_time` requests in flight."""
    gate = asyncio.Semaphore(at_a_time)
    async with httpx.AsyncClient(base_url=stack.url, timeout=280) as client:

        async def one(prompt: list[int]) -> list[int]:
            body = {
                "prompt": prompt,
                "max_tokens": NUM_OUTPUT,
                "temperature": 0,
                "ignore_eos": True,
                "return_token_ids": True,
            }
            async with gate:
                response = await client.post("/v1/completions", json=body)
            assert response.status_code == 200, response.text
            token_ids: list[int] = response.json()["choices"][0]["token_ids"]
            return token_ids

        return list(await asyncio.gather(*(one(prompt) for prompt in prompts)))


def forced(model: Any, prompt: list[int], token_ids: list[int]) -> list[int]:
    """What the model itself finds most likely at the place of each of `token_ids`, all before it given."""
    with torch.inference_mode():
        logits = model(torch.tensor([prompt + token_ids[:-1]])).logits[0, len(prompt) - 1 :]
    found: list[int] = logits.float().argmax(-1).tolist()
    return found


def assert_equal(found: list[Reference], ours: list[list[int]]) -> None:
    wholly = sum(reference.token_ids == token_ids for reference, token_ids in zip(found, ours, strict=True))
    differing = [(r.prompt_ids, r.token_ids, t) for r, t in zip(found, ours, strict=True) if not r.agrees(t)]
    assert not differing, differing
    assert wholly >= len(found) - 1


@pytest.fixture(scope="module")
def embedded_weights() -> Path:
    return weights_folder(resolve_model("embedded"))


def test_greedy_equals_transformers_with_prefix_hits_chunked_prefill_and_preemption(embedded_weights: Path) -> None:
    prompts = tokenize("embedded", PROMPTS)
    flags = ("--dtype=float32", "--max-num-batched-tokens=48", "--max-num-seqs=16")
    with running_stack(*flags, TOKENLOOM_NUM_BLOCKS="24") as stack:
        before = stack.metrics()
        ours = asyncio.run(greedy(stack, prompts))
        after = stack.metrics()
    assert max(map(len, prompts)) > 48, "some prompts need several chunks"
    assert after["tokenloom_num_preemptions_total"] > before["tokenloom_num_preemptions_total"]
    assert after["tokenloom_prefix_cache_hits_total"] > before["tokenloom_prefix_cache_hits_total"]
    assert_equal(references(load(embedded_weights, torch.float32), prompts), ours)


@pytest.mark.parametrize("family", ["qwen3", "gpt2"])
def test_other_families_equal_transformers(family: Family, tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path / f"tiny-{family}", family)
    prompts = tokenize(str(folder), PROMPTS)
    flags = (f"--model={folder}", "--dtype=float32", "--max-num-batched-tokens=48", "--max-num-seqs=16")
    with running_stack(*flags, TOKENLOOM_NUM_BLOCKS="24") as stack:
        ours = asyncio.run(greedy(stack, prompts))
        assert stack.metrics()["tokenloom_num_preemptions_total"] > 0
    assert_equal(references(load(folder, torch.float32), prompts), ours)


def test_bf16_agrees_with_transformers_when_teacher_forced(embedded_weights: Path) -> None:
    (prompt,) = tokenize("embedded", [" ".join(PROMPTS[:1] + PROMPTS[10:15])])
    with running_stack("--dtype=bfloat16") as stack:
        body = {"prompt": prompt, "max_tokens": 1, "temperature": 0, "prompt_logprobs": 1}
        response = httpx.post(f"{stack.url}/v1/completions", json=body, timeout=280).json()
    positions = response["choices"][0]["prompt_logprobs"]
    assert positions[0] is None
    ours = [int(max(entries, key=lambda i: entries[i]["logprob"])) for entries in positions[1:]]
    with torch.inference_mode():
        logits = load(embedded_weights, torch.bfloat16)(torch.tensor([prompt])).logits[0, :-1]
    theirs = logits.float().argmax(-1).tolist()
    assert len(ours) == len(theirs) > 100
    agreeing = sum(a == b for a, b in zip(ours, theirs, strict=True))
    assert agreeing / len(theirs) >= 0.97, f"{agreeing} of {len(theirs)}"


@pytest.mark.parametrize("family", ["qwen3", "gpt2"])
def test_decode_over_a_bf16_cache_agrees_with_transformers_when_teacher_forced(family: Family, tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path / f"tiny-{family}", family)
    prompts = tokenize(str(folder), PROMPTS[:4] + PROMPTS[10:14])
    with running_stack(f"--model={folder}", "--dtype=bfloat16") as stack:
        ours = asyncio.run(greedy(stack, prompts))
    model = load(folder, torch.bfloat16)
    theirs = [forced(model, prompt, token_ids) for prompt, token_ids in zip(prompts, ours, strict=True)]
    pairs = [pair for our, their in zip(ours, theirs, strict=True) for pair in zip(our, their, strict=True)]
    assert len(pairs) == len(prompts) * NUM_OUTPUT
    agreeing = sum(a == b for a, b in pairs)
    assert agreeing / len(pairs) >= 0.97, f"{agreeing} of {len(pairs)}"
