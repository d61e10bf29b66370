"""Bodies of OpenAI's requests, with vLLM's extensions under vLLM's names.

What Tokenloom cannot do is refused with the field named; fields that it does not know are ignored.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Discriminator, Field, Tag, field_validator, model_validator

from tokenloom.gateway.field_types import (
    MAX_NUM_CHOICES,
    MAX_NUM_MESSAGES,
    MAX_NUM_PARTS,
    MAX_NUM_TOOLS,
    MAX_U32,
    Body,
    Count,
    LogitBias,
    NumChoices,
    NumLogprobs,
    Penalty,
    PositiveCount,
    Probability,
    Prompts,
    Seed,
    StopStrings,
    Temperature,
    Timeout,
    TokenId,
    TopK,
    refusal,
)


class StreamOptions(Body):
    """What a stream carries beside its text."""

    include_usage: bool | None = None


class GenerationBody(Body):
    """Fields that both endpoints share. Absent and null mean the model's or the stack's default."""

    model: str | None = Field(None, description="The model to ask; absent: the one served.")
    n: NumChoices | None = Field(None, description="Choices per prompt; 1 if absent.")
    temperature: Temperature | None = None
    top_p: Probability | None = None
    top_k: TopK | None = Field(None, description="Keep the k most likely tokens; 0 or -1 keeps all.")
    min_p: Probability | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    repetition_penalty: Annotated[float, Field(gt=0, le=100)] | None = None
    logit_bias: LogitBias | None = None
    seed: Seed | None = None
    stop: StopStrings | None = None
    stop_token_ids: Annotated[list[TokenId], Field(max_length=1024, fail_fast=True)] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    min_tokens: Count | None = None
    skip_special_tokens: bool | None = None
    prompt_logprobs: NumLogprobs | None = None
    return_token_ids: bool | None = None
    cache_salt: Annotated[str, Field(max_length=1024)] | None = None
    priority: Annotated[int, Field(ge=0, le=MAX_U32)] | None = Field(
        None, description="0 is the most urgent class; absent: the highest that the key may have."
    )
    timeout: Timeout | None = None
    user: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    resumable: bool | None = Field(
        None,
        description="Only with stream: its events have ids, and a client that lost its connection gets the rest from "
        "any gateway by sending the same body again with the header Last-Event-ID.",
    )

    @property
    def num_choices(self) -> int:
        """Choices per prompt."""
        return 1 if self.n is None else self.n

    @property
    def includes_usage(self) -> bool:
        """A stream ends with a chunk that holds the usage."""
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    @model_validator(mode="after")
    def _check_streaming(self) -> Self:
        if self.stream_options is not None and not self.stream:
            raise refusal("is only allowed when stream is true", param="stream_options")
        if self.prompt_logprobs is not None and self.stream:
            raise refusal("is not available in streams", param="prompt_logprobs")
        if self.resumable and not self.stream:
            raise refusal("is only allowed when stream is true", param="resumable")
        return self


_PARTS = ("content", "tool_calls")


class TextPart(Body):
    """A part of a message's content."""

    type: Literal["text"]
    text: str

    @field_validator("type", mode="before")
    @classmethod
    def _check_type(cls, value: Any) -> Any:
        if isinstance(value, str) and value != "text":
            raise refusal(f"content parts of type {value[:40]!r} are not supported; only 'text' is", code="unsupported")
        return value


def _content_kind(value: Any) -> str:
    return "<parts>" if isinstance(value, list) else "<text>"


Content = Annotated[
    Annotated[str, Tag("<text>")] | Annotated[list[TextPart], Field(max_length=1024, fail_fast=True), Tag("<parts>")],
    Discriminator(_content_kind),
]


class FunctionCall(Body):
    """The function that a tool call names."""

    name: str
    arguments: str = Field(description="A JSON text.")


class ToolCall(Body):
    """A call that an assistant turn made."""

    id: str
    type: Literal["function"] = "function"
    function: FunctionCall


class Message(Body):
    """One turn of a conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: Content | None = None
    name: str | None = None
    tool_calls: Annotated[list[ToolCall], Field(fail_fast=True)] | None = None
    tool_call_id: str | None = None

    @property
    def text(self) -> str | None:
        """The content as one string, parts joined with a newline; None if there is none."""
        if isinstance(self.content, list):
            return "\n".join(part.text for part in self.content)
        return self.content

    @model_validator(mode="after")
    def _check_content(self) -> Self:
        if self.content is None and self.role != "assistant":
            raise refusal(f"a message with role {self.role!r} needs content", param=".content", code="missing")
        return self


def _check_num_parts(messages: Any) -> Any:
    """Bound what the messages hold together, before anything is made of it."""
    if isinstance(messages, list) and len(messages) <= MAX_NUM_MESSAGES:
        lists = (message.get(name) for message in messages if isinstance(message, dict) for name in _PARTS)
        if (num_parts := sum(len(parts) for parts in lists if isinstance(parts, list))) > MAX_NUM_PARTS:
            raise refusal(f"hold {num_parts} content parts and tool calls; at most {MAX_NUM_PARTS} are accepted")
    return messages


class ResponseFormat(Body):
    """The form that the answer must have."""

    type: str


class ChatBody(GenerationBody):
    """Body of POST /v1/chat/completions."""

    messages: Annotated[
        list[Message],
        Field(min_length=1, max_length=MAX_NUM_MESSAGES, fail_fast=True),
        BeforeValidator(_check_num_parts),
    ]
    max_tokens: PositiveCount | None = Field(None, description="Older name of max_completion_tokens.")
    max_completion_tokens: PositiveCount | None = Field(None, description="Absent: the rest of the context.")
    logprobs: bool | None = None
    top_logprobs: NumLogprobs | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    response_format: ResponseFormat | None = None
    tools: Annotated[list[dict[str, Any]], Field(max_length=MAX_NUM_TOOLS, fail_fast=True)] | None = None
    tool_choice: Any = None

    @property
    def num_logprobs(self) -> int | None:
        """Logprobs per token beside the sampled token's; None: not asked for."""
        return (self.top_logprobs or 0) if self.logprobs else None

    @property
    def max_generated_tokens(self) -> int | None:
        """The limit in force; None: the rest of the context."""
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @model_validator(mode="after")
    def _check_combinations(self) -> Self:
        if self.top_logprobs is not None and not self.logprobs:
            raise refusal("needs logprobs to be true", param="top_logprobs")
        if self.continue_final_message and self.add_generation_prompt:
            raise refusal("cannot be combined with add_generation_prompt", param="continue_final_message")
        if self.tools and self.tool_choice != "none":
            message = "tool calling is not supported; leave tools out or send tool_choice 'none'"
            raise refusal(message, param="tools", code="unsupported")
        if self.response_format is not None and self.response_format.type != "text":
            message = f"{self.response_format.type[:40]!r} is not supported; only 'text' is"
            raise refusal(message, param="response_format", code="unsupported")
        return self


class CompletionBody(GenerationBody):
    """Body of POST /v1/completions."""

    prompt: Prompts
    max_tokens: PositiveCount | None = Field(None, description="Absent: the rest of the context.")
    logprobs: NumLogprobs | None = None
    echo: bool | None = None
    best_of: NumChoices | None = None
    suffix: str | None = None

    @property
    def num_logprobs(self) -> int | None:
        """Logprobs per token beside the sampled token's; None: not asked for."""
        return self.logprobs

    @property
    def max_generated_tokens(self) -> int | None:
        """The limit in force; None: the rest of the context."""
        return self.max_tokens

    @model_validator(mode="after")
    def _check_combinations(self) -> Self:
        if self.best_of is not None and self.best_of != self.num_choices:
            raise refusal("is only supported when it equals n", param="best_of", code="unsupported")
        if self.resumable:
            self._check_resumable()
        if self.suffix:
            raise refusal("is not supported", param="suffix", code="unsupported")
        return self

    def _check_resumable(self) -> None:
        """Refuse what could not be cut anywhere: what is told of a token must not depend on the text before it."""
        for name, is_asked in (("echo", bool(self.echo)), ("logprobs", self.logprobs is not None)):
            if is_asked:
                raise refusal("cannot be combined with resumable", param=name, code="unsupported")
        if len(self.prompt) * self.num_choices > MAX_NUM_CHOICES:
            message = f"times the number of prompts must be at most {MAX_NUM_CHOICES} in a resumable stream"
            raise refusal(message, param="n")
