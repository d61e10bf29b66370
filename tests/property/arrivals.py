"""What the scheduler machine draws: limits, tenants' policies and requests.

Tiny numbers, so that everything runs out all the time: few different prompts with long common prefixes over a
vocabulary of two tokens, pools of a few blocks, budgets of a few tokens, queues of a few requests.
"""

from __future__ import annotations

from hypothesis import strategies as st

from tests.shadow_engine import WANTS_PROMPT_LOGPROBS
from tokenloom.scheduler.core.request import Request
from tokenloom.scheduler.core.scheduler import SchedulerConfig, SchedulingPolicy
from tokenloom.scheduler.core.tenants import TenantPolicy

TENANTS = ["", "a", "b", "c"]

PROMPTS = st.one_of(
    st.lists(st.integers(0, 1), min_size=1, max_size=6),
    st.integers(1, 14).map(lambda n: [0] * n),
    st.tuples(st.integers(1, 6), st.integers(0, 3)).map(lambda n: [0, 1] * n[0] + [1] * n[1]),
)
# Times are whole seconds and charges powers of two, so that sums are exact.
CONFIGS = st.builds(
    SchedulerConfig,
    max_num_seqs=st.integers(1, 6),
    max_num_batched_tokens=st.sampled_from([1, 2, 3, 5, 8, 12, 20]),
    max_num_waiting=st.integers(2, 12),
    max_num_waiting_tokens=st.sampled_from([12, 40, 1_000_000, 1_000_000]),
    max_model_len=st.integers(8, 60),
    block_size=st.integers(1, 4),
    policy=st.sampled_from([SchedulingPolicy.FAIR, SchedulingPolicy.FAIR, SchedulingPolicy.FCFS]),
    num_priority_classes=st.integers(1, 4),
    ageing_s=st.sampled_from([0.0, 1.0, 4.0]),
    prompt_token_charge=st.sampled_from([1.0, 0.5]),
    output_token_charge=st.sampled_from([2.0, 1.0]),
)
POLICIES = st.builds(
    TenantPolicy,
    weight=st.sampled_from([0.25, 1.0, 1.0, 2.0, 8.0]),
    max_num_running=st.sampled_from([None, None, 1, 2]),
    max_num_waiting=st.sampled_from([None, None, 1, 3]),
    max_tokens_per_minute=st.sampled_from([None, None, 30, 200]),
)


def requests() -> st.SearchStrategy[Request]:
    """Requests without a name; the machine names them and turns deadlines into times."""
    return st.builds(
        Request,
        request_id=st.just(""),
        prompt_token_ids=PROMPTS,
        max_output_tokens=st.integers(1, 16),
        stop_token_ids=st.sampled_from([frozenset[int](), frozenset[int](), frozenset({0}), frozenset({1})]),
        min_output_tokens=st.integers(0, 8),
        tenant=st.sampled_from(TENANTS),
        priority_class=st.sampled_from([0, 0, 1, 2, 3, 9]),
        cache_salt=st.sampled_from(["", "", "", "blue"]),
        deadline_s=st.sampled_from([None, None, None, None, 3.0, 40.0]),
        payload=st.sampled_from([None, None, None, None, WANTS_PROMPT_LOGPROBS]),
    )
