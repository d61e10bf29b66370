"""What a request asks for, free of protobuf and gRPC.

None means that the caller left the choice to the model or to the stage; `validation.py` checks the ranges and
`generation.py` fills the defaults in.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How the next token is chosen; ranges and meanings stand in common.proto."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float | None = None
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    seed: int | None = None
    num_logprobs: int | None = None
    num_prompt_logprobs: int | None = None


@dataclass(frozen=True, slots=True)
class StopConditions:
    """When a choice ends by token; `max_tokens` None is the rest of the context."""

    max_tokens: int | None = None
    min_tokens: int = 0
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A function call that an assistant turn made; `arguments_json` as the model wrote it."""

    id: str
    name: str
    arguments_json: str


@dataclass(frozen=True, slots=True)
class ChatMessage:
    """One turn; `content` None (an assistant turn that only calls tools) differs from empty."""

    role: str
    content: str | None
    name: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str = ""


@dataclass(frozen=True, slots=True)
class ChatInput:
    """A conversation to continue; `add_generation_prompt` None is true unless the final message is continued.

    `prompt_token_ids` are what it was rendered to before, if it is sent again; nothing else is looked at then.
    """

    messages: tuple[ChatMessage, ...]
    tools_json: tuple[str, ...] = ()
    template_kwargs_json: str = ""
    add_generation_prompt: bool | None = None
    continue_final_message: bool = False
    prompt_token_ids: Sequence[int] | None = None


@dataclass(frozen=True, slots=True)
class CompleteInput:
    """Prompts to continue, each a text or token ids; `echo` sends the prompt's text first."""

    prompts: tuple[str | Sequence[int], ...]
    echo: bool = False


@dataclass(frozen=True, slots=True)
class Options:
    """What Chat and Complete share; meanings stand in inference.proto's GenerationOptions."""

    model: str = ""
    sampling: SamplingParams = SamplingParams()
    stop: StopConditions = StopConditions()
    stop_strings: tuple[str, ...] = ()
    include_stop_string: bool = False
    num_choices: int = 1
    skip_special_tokens: bool = True
    has_grammar: bool = False
    priority_class: int | None = None
    cache_salt: str = ""
    request_id: str = ""
    return_token_ids: bool = False
    resume_token_ids: tuple[Sequence[int], ...] = ()
    finished_choices: frozenset[int] = frozenset()
    num_cached_tokens: Mapping[int, int] = field(default_factory=dict)
    resumable: bool = False
    num_skipped_tokens: Mapping[int, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Trace:
    """W3C trace context; empty strings if there is none."""

    traceparent: str = ""
    tracestate: str = ""


@dataclass(frozen=True, slots=True)
class Caller:
    """Who asks.

    Args:
        tenant: whom the scheduler charges; empty if no keys are set.
        highest_class: most urgent priority class that the caller may ask for, and gets without asking; 0 is the most
            urgent of all.
        is_isolated: the caller's cached prefixes are shared with no other tenant.
    """

    tenant: str = ""
    highest_class: int = 0
    is_isolated: bool = False


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """A whole request.

    Args:
        remaining_time_s: time left when the request came in; None: no deadline.
        age_s: how long a gateway had it before, if it sends it again; bounds on new requests leave it out. None: new.
        wants_prompt_ids: Accepted carries the prompts' ids.
    """

    input: ChatInput | CompleteInput
    options: Options
    caller: Caller = Caller()
    trace: Trace = Trace()
    remaining_time_s: float | None = None
    age_s: float | None = None
    wants_prompt_ids: bool = True

    @property
    def kind(self) -> str:
        """`chat` or `complete`, for spans, metrics and logs."""
        return "chat" if isinstance(self.input, ChatInput) else "complete"

    def scoped_id(self, request_id: str) -> str:
        """A request id as the engine knows it; tenants cannot meet each other's."""
        return f"{self.caller.tenant}/{request_id}" if self.caller.tenant else request_id

    @property
    def num_choices(self) -> int:
        """Choices of all prompts."""
        num_prompts = len(self.input.prompts) if isinstance(self.input, CompleteInput) else 1
        return self.options.num_choices * num_prompts


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """What the engine said about itself in Welcome.

    Args:
        max_num_waiting: choices that may wait; a call with more of them could never be taken. 0: not told.
    """

    epoch: str
    model_id: str
    vocab_size: int
    max_model_len: int
    max_num_logprobs: int
    eos_token_ids: frozenset[int]
    default_sampling: SamplingParams
    max_num_waiting: int = 0


@dataclass(frozen=True, slots=True)
class EngineLoad:
    """How busy the engine said it is: requests and blocks, and whether it waits for an executor."""

    num_running: int = 0
    num_waiting: int = 0
    num_free_blocks: int = 0
    num_blocks: int = 0
    waits_for_executor: bool = False


@dataclass(frozen=True, slots=True)
class Submission:
    """One choice as the engine gets it; nothing in it changes when it is sent again.

    Args:
        sampling: every default filled in, with this choice's own seed.
        submitted_at_s: monotonic time at which the request was first taken.
        deadline_s: monotonic time at which its time is up; None: no deadline.
        is_resubmitted: a gateway sends it again, so bounds do not apply again.
    """

    request_id: str
    group_id: str
    choice_index: int
    prompt_token_ids: Sequence[int]
    sampling: SamplingParams
    stop: StopConditions
    priority_class: int
    tenant: str
    cache_salt: str
    trace: Trace
    submitted_at_s: float
    deadline_s: float | None
    is_resubmitted: bool
    is_resumable: bool
