"""The runner against transformers' own generate, and its behaviour when something goes wrong."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from tests.tiny_models import Family, make_tiny_model
from tokenloom.common.errors import InvalidArgument
from tokenloom.executor.attention_torch import TorchAttention
from tokenloom.executor.forward import TorchForward
from tokenloom.executor.gate import record_layout
from tokenloom.executor.model import PagedModel
from tokenloom.executor.plan import NewRow, Plan, PlannedRow, PromptLogprobs, Result, SamplingParams
from tokenloom.executor.row_checks import Limits
from tokenloom.executor.runner import Runner, RunnerParts
from tokenloom.executor.sampler import Sampler

GREEDY = SamplingParams(temperature=0.0)
BLOCK = 4


class Driver:
    """A scheduler in small: each row gets blocks of its own and runs in the chunks it is told."""

    def __init__(self, runner: Runner, num_blocks: int = 400) -> None:
        self.runner = runner
        self.step_id = 0
        self.ids: dict[int, list[int]] = {}
        self.num_prompt: dict[int, int] = {}
        self.num_computed: dict[int, int] = {}
        self.num_blocks_of: dict[int, int] = {}
        self.free = list(range(num_blocks - 1, 0, -1))
        self.pending_new: dict[int, NewRow] = {}
        runner.initialize(num_blocks)

    def add(
        self, row_id: int, prompt: list[int], params: SamplingParams = GREEDY, generated: tuple[int, ...] = ()
    ) -> None:
        self.pending_new[row_id] = NewRow(row_id, prompt, generated, params)
        self.ids[row_id] = [*prompt, *generated]
        self.num_prompt[row_id] = len(prompt)
        self.num_computed[row_id] = self.num_blocks_of[row_id] = 0

    def step(self, chunks: dict[int, int], finished: tuple[int, ...] = ()) -> Result:
        """Run one plan in which each row computes so many of its tokens, or what it has left."""
        self.step_id += 1
        rows = []
        for row_id, wanted in chunks.items():
            first = self.num_computed[row_id]
            num = min(wanted, len(self.ids[row_id]) - first)
            needed = -(-(first + num) // BLOCK) - self.num_blocks_of[row_id]
            blocks = [self.free.pop() for _ in range(needed)]
            feeds_back = num == 1 and row_id not in self.pending_new and first >= self.num_prompt[row_id]
            rows.append(PlannedRow(row_id, num, first, blocks, feeds_back))
            self.num_computed[row_id] += num
            self.num_blocks_of[row_id] += needed
        new = [self.pending_new.pop(row_id) for row_id in chunks if row_id in self.pending_new]
        result = self.runner.execute(Plan(self.step_id, rows, new, finished))
        for sampled in result.sampled:
            self.ids[sampled.row_id].append(sampled.token_id)
        return result

    def generated(self, row_id: int) -> list[int]:
        return self.ids[row_id][self.num_prompt[row_id] :]


def make_runner(causal_lm: Any, max_num_batched_tokens: int = 600, max_model_len: int = 1024) -> Runner:
    model = PagedModel(causal_lm)
    limits = Limits(model.vocab_size, max_model_len, BLOCK, 32, max_num_batched_tokens)
    return Runner(RunnerParts(TorchForward(model, record_layout(model), TorchAttention()), Sampler((2,)), limits, 1000))


@pytest.fixture
def llama() -> Any:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return make_tiny_model("llama")


def prompts(num: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(7)
    lens = [1, 2, 3, 4, 5, 9, 16, 17, 30, 61]
    return [torch.randint(3, 512, (lens[i % 10],), generator=generator).tolist() for i in range(num)]


def generate(family: Family, prompt: list[int], num_tokens: int) -> list[int]:
    """transformers' own greedy continuation on the same weights."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        causal_lm = make_tiny_model(family)
    ids = torch.tensor([prompt])
    out = causal_lm.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=num_tokens, do_sample=False, eos_token_id=None
    )
    found: list[int] = out[0, len(prompt) :].tolist()
    return found


def test_chunked_and_interleaved_rows_equal_transformers_greedy_generate(family: Family, tiny_causal_lm: Any) -> None:
    driver = Driver(make_runner(tiny_causal_lm))
    wanted = prompts(8)
    chunk = [1, 3, 5, 7]
    for step in range(45):
        if step % 2 == 0 and step // 2 < len(wanted):  # rows join while others run
            driver.add(step // 2, wanted[step // 2])
        running = [row_id for row_id in driver.ids if len(driver.generated(row_id)) < 16]
        if running:
            driver.step({row_id: chunk[(row_id + step) % 4] for row_id in running})
    for row_id, prompt in enumerate(wanted):
        assert driver.generated(row_id) == generate(family, prompt, 16)


def test_a_prefix_hit_reads_the_blocks_that_another_row_wrote(llama: Any) -> None:
    driver = Driver(make_runner(llama))
    prompt = prompts(10)[9]
    driver.add(1, prompt)
    driver.step({1: 100})
    shared = 8 * BLOCK
    blocks = list(range(1, 1000))
    plan = Plan(
        2,
        [PlannedRow(2, len(prompt) - shared, shared, [*range(1, 9), *blocks[300:320]])],
        [NewRow(2, prompt, (), GREEDY)],
    )
    # Driver hands out blocks from 1 upwards.
    assert driver.runner.execute(plan).sampled[0].token_id == driver.generated(1)[0]


def test_a_row_that_comes_back_with_its_generated_tokens_goes_on_as_if_undisturbed(llama: Any) -> None:
    params = SamplingParams(
        temperature=0.9, top_p=0.95, seed=11, frequency_penalty=0.5, repetition_penalty=1.2, presence_penalty=0.1
    )
    prompt = prompts(6)[5]
    whole = Driver(make_runner(llama))
    whole.add(1, prompt, params)
    for _ in range(25):
        whole.step({1: 100})
    resumed = Driver(make_runner(llama))
    resumed.add(1, prompt, params)
    for _ in range(9):
        resumed.step({1: 100})
    resumed.add(2, prompt, params, tuple(resumed.generated(1)))
    resumed.step({2: 4}, finished=(1,))
    for _ in range(25 + 3):
        if len(resumed.generated(2)) < 25:
            resumed.step({2: 4})
    assert resumed.generated(2) == whole.generated(1)
    assert len(set(whole.generated(1))) > 10


def test_the_same_seed_gives_the_same_tokens_alone_and_among_sixteen(llama: Any) -> None:
    wanted = prompts(16)
    params = [SamplingParams(temperature=1.0, top_p=0.9, seed=100 + i) for i in range(16)]
    together = Driver(make_runner(llama))
    for i in range(16):
        together.add(i, wanted[i], params[i])
    for _ in range(12):
        together.step(dict.fromkeys(range(16), 100))
    for i in range(16):
        alone = Driver(make_runner(llama))
        alone.add(i, wanted[i], params[i])
        for _ in range(12):
            alone.step({i: 100})
        assert alone.generated(i) == together.generated(i)


@pytest.mark.parametrize("chunk", [5, 300])
def test_prompt_logprobs_equal_a_plain_forward_pass_in_any_chunking(llama: Any, chunk: int) -> None:
    generator = torch.Generator().manual_seed(1)
    prompt = torch.randint(3, 512, (290 if chunk == 300 else 23,), generator=generator).tolist()
    driver = Driver(make_runner(llama))
    driver.add(1, prompt, SamplingParams(temperature=0.0, num_prompt_logprobs=3))
    runs: list[PromptLogprobs] = []
    while not driver.generated(1):
        runs += driver.step({1: chunk}).prompt_logprobs
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        plain = make_tiny_model("llama")
    with torch.inference_mode():
        expected = torch.log_softmax(plain(torch.tensor([prompt])).logits[0].double(), dim=-1)
    position = 1
    for run in runs:
        assert run.first_position == position
        for entry in run.entries:
            best = expected[position - 1].topk(3)
            assert entry.token_ids == [prompt[position], *best.indices.tolist()]
            reference = [float(expected[position - 1, prompt[position]]), *best.values.tolist()]
            assert entry.logprobs == pytest.approx(reference, abs=1e-4)
            position += 1
    assert position == len(prompt)


def test_logits_that_are_not_finite_fail_their_row_and_no_other(llama: Any) -> None:
    poison = 77
    with torch.no_grad():
        llama.model.embed_tokens.weight[poison] = math.nan
    wanted = prompts(3)
    driver = Driver(make_runner(llama))
    driver.add(1, wanted[1])
    driver.add(2, [*wanted[2], poison])
    first = driver.step({1: 100, 2: 100})
    assert [failure.row_id for failure in first.failures] == [2]
    assert first.failures[0].error.reason == "LOGITS_NOT_FINITE"
    assert [sampled.row_id for sampled in first.sampled] == [1]
    # A plan that was in flight still names the failed row; the good one goes on.
    again = driver.runner.execute(Plan(2, [PlannedRow(1, 1, 2, [50], True), PlannedRow(2, 1, 4, [51], True)]))
    assert [failure.row_id for failure in again.failures] == [2]
    assert [sampled.row_id for sampled in again.sampled] == [1]


def test_blocks_of_a_failed_row_are_safe_for_the_next_row_that_gets_them(llama: Any) -> None:
    poison = 77
    with torch.no_grad():
        llama.model.embed_tokens.weight[poison] = math.nan
    runner = make_runner(llama)
    runner.initialize(10)
    bad, good = [poison] * 8, [5, 6, 7]
    runner.execute(Plan(1, [PlannedRow(1, 8, 0, [1, 2])], [NewRow(1, bad, (), GREEDY)]))
    reused = Plan(2, [PlannedRow(2, 3, 0, [2])], [NewRow(2, good, (), GREEDY)], finished_row_ids=[1])
    token = runner.execute(reused).sampled[0].token_id
    assert token == generate("llama", good, 1)[0]


def test_a_step_that_raises_fails_its_rows_and_leaves_the_others(llama: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Driver(make_runner(llama))
    driver.add(1, [5, 6, 7])
    driver.step({1: 100})
    driver.add(2, [8, 9])
    with monkeypatch.context() as patch:
        patch.setattr(PagedModel, "hidden_states", lambda *_: (_ for _ in ()).throw(RuntimeError("out of memory")))
        with pytest.raises(RuntimeError, match="out of memory"):
            driver.step({2: 2})
    after = driver.runner.execute(Plan(4, [PlannedRow(1, 1, 3, feeds_back=True), PlannedRow(2, 1, 2, feeds_back=True)]))
    assert [sampled.row_id for sampled in after.sampled] == [1]
    assert [failure.error.reason for failure in after.failures] == ["STEP_FAILED"]


@pytest.mark.parametrize("num_blocks", [0, 1, 1001])
def test_memory_that_does_not_fit_is_refused(llama: Any, num_blocks: int) -> None:
    with pytest.raises(InvalidArgument, match="from 2 to 1000 fit"):
        make_runner(llama).initialize(num_blocks)
