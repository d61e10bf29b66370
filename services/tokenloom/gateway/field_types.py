"""Field types of request bodies: strict, ranged, and with errors in the caller's terms.

Strict means that "2" and true are no integers and that 1.5 is none either. A JSON null stands for an absent field, as
OpenAI's clients send it.
"""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, PlainValidator, WithJsonSchema
from pydantic_core import PydanticCustomError

MAX_U32 = 2**32 - 1
MAX_NUM_CHOICES = 128
MAX_NUM_LOGPROBS = 20
MAX_NUM_PROMPTS = 1024
MAX_TIMEOUT_S = 86_400
# Bounds on what is looked at one by one, so that no body holds the event loop for long.
MAX_NUM_PROMPT_IDS = 1 << 20
MAX_NUM_BIASES = 1024
MAX_NUM_MESSAGES = 4096
MAX_NUM_PARTS = 8192
MAX_NUM_TOOLS = 1024
_IDS_PER_CHECK = 1 << 15  # a check of so many holds the interpreter for less than a millisecond

Count = Annotated[int, Field(ge=0, le=MAX_U32)]
PositiveCount = Annotated[int, Field(ge=1, le=MAX_U32)]
NumChoices = Annotated[int, Field(ge=1, le=MAX_NUM_CHOICES)]
NumLogprobs = Annotated[int, Field(ge=0, le=MAX_NUM_LOGPROBS)]
TokenId = Annotated[int, Field(ge=0, le=MAX_U32)]
Seed = Annotated[int, Field(ge=-(2**63), le=2**64 - 1)]
Temperature = Annotated[float, Field(ge=0, le=2)]
Probability = Annotated[float, Field(ge=0, le=1)]
Penalty = Annotated[float, Field(ge=-2, le=2)]
Timeout = Annotated[float, Field(gt=0, le=MAX_TIMEOUT_S, description="Seconds that the request may take.")]


class Body(BaseModel):
    """An object in a request: strict types, unknown fields ignored, no NaN or infinity."""

    model_config = ConfigDict(strict=True, extra="ignore", allow_inf_nan=False, frozen=True)


def refusal(message: str, param: str = "", code: str = "invalid_value") -> PydanticCustomError:
    """A validation error in the caller's terms.

    Args:
        message: what is wrong and what is accepted.
        param: the field at fault, if it is not the one being validated.
        code: for programs.
    """
    return PydanticCustomError("refusal", "{message}", {"message": message, "param": param, "code": code})


def _as_list(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


StopStrings = Annotated[
    list[Annotated[str, Field(min_length=1, max_length=1024)]],
    Field(max_length=16, fail_fast=True),
    BeforeValidator(_as_list, json_schema_input_type=str | list[str]),
]


def _to_top_k(value: Any) -> Any:
    """0 and -1 both keep every token."""
    return 0 if type(value) is int and value == -1 else value


TopK = Annotated[int, Field(ge=0, le=MAX_U32), BeforeValidator(_to_top_k, json_schema_input_type=int)]


def _to_logit_bias(value: Any) -> dict[int, float]:
    """JSON's keys are strings: the token ids in decimal."""
    if not isinstance(value, dict):
        raise refusal("must be an object that maps token ids to numbers", code="invalid_type")
    if len(value) > MAX_NUM_BIASES:
        raise refusal(f"has {len(value)} entries; at most {MAX_NUM_BIASES} are accepted")
    biases: dict[int, float] = {}
    for key, bias in value.items():
        if not (isinstance(key, str) and key.isascii() and key.isdecimal() and int(key) <= MAX_U32):
            raise refusal(f"{str(key)[:40]!r} is no token id")
        if type(bias) not in (int, float) or not -100 <= bias <= 100:
            raise refusal(f"the bias of token {key} must be a number from -100 to 100")
        biases[int(key)] = float(bias)
    return biases


LogitBias = Annotated[
    dict[int, float],
    PlainValidator(_to_logit_bias),
    WithJsonSchema({"type": "object", "additionalProperties": {"type": "number", "minimum": -100, "maximum": 100}}),
]


def _to_prompts(value: Any) -> list[str | list[int]]:
    """Read a string, a list of strings, a list of token ids or a list of such lists as a list of prompts."""
    if isinstance(value, str):
        prompts: list[Any] = [value]
    elif not isinstance(value, list):
        raise refusal(
            "must be a string, a list of strings, a list of token ids or a list of those", code="invalid_type"
        )
    elif value and not isinstance(value[0], str | list):  # the others are checked with their prompt
        prompts = [value]
    else:
        prompts = value
    if not prompts:
        raise refusal("is empty; at least one prompt with at least one token is needed")
    if len(prompts) > MAX_NUM_PROMPTS:
        raise refusal(f"holds {len(prompts)} prompts; at most {MAX_NUM_PROMPTS} are accepted")
    num_ids = sum(len(prompt) for prompt in prompts if isinstance(prompt, list))
    if num_ids > MAX_NUM_PROMPT_IDS:
        raise refusal(f"holds {num_ids} token ids; at most {MAX_NUM_PROMPT_IDS} are accepted")
    for number, prompt in enumerate(prompts):
        _check_prompt(number, prompt)
    return prompts


def _check_prompt(number: int, prompt: Any) -> None:
    if not isinstance(prompt, str | list):
        raise refusal(f"prompt {number} is neither a string nor a list of token ids", code="invalid_type")
    if not prompt:
        raise refusal(f"prompt {number} is empty; at least one token is needed")
    if isinstance(prompt, str):
        return
    for start in range(0, len(prompt), _IDS_PER_CHECK):
        _check_ids(number, prompt[start : start + _IDS_PER_CHECK])


def _check_ids(number: int, token_ids: list[Any]) -> None:
    if set(map(type, token_ids)) == {int} and min(token_ids) >= 0 and max(token_ids) <= MAX_U32:
        return
    for token_id in token_ids:
        if type(token_id) is not int:
            raise refusal(f"{str(token_id)[:40]!r} in prompt {number} is no token id", code="invalid_type")
        if not 0 <= token_id <= MAX_U32:
            raise refusal(f"token id {token_id} in prompt {number} is outside the vocabulary")


Prompts = Annotated[
    list[str | list[int]],
    PlainValidator(_to_prompts),
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "string"},
                {"type": "array", "items": {"type": "string"}},
                {"type": "array", "items": {"type": "integer"}},
                {"type": "array", "items": {"type": "array", "items": {"type": "integer"}}},
            ]
        }
    ),
]
