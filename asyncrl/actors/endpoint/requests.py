"""Requests of agents as chat completions, into which the other protocols are translated, and in vLLM's token dialect.

Fields that ask for other sampling than the run's are overruled where the reply still means the same (temperature,
top_p), and refused where it would not (penalties, several candidates per token). Those that constrain the reply's form
are the affair of constraints.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from asyncrl.actors.endpoint.content import UnreadableContent, text_of
from asyncrl.data.base import Message
from asyncrl.rendering.roles import unknown_role
from asyncrl.rendering.tool_calls import arguments_of

MAX_CHOICES = 64


class BadRequest(Exception):
    """A request that gets an error in OpenAI's form, which clients do not retry."""

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None, status: int = 400) -> None:
        super().__init__(message)
        self.param, self.code, self.status = param, code, status


@dataclass(frozen=True, slots=True)
class RequestedSampling:
    """The sampling that a request asks for, within the limits of the run."""

    n: int = 1
    max_new_tokens: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    seed: int | None = None


class _Body(BaseModel):
    model_config = ConfigDict(extra="allow")


class _StreamOptions(_Body):
    include_usage: bool = False


B = TypeVar("B", bound=_Body)


class ChatBody(_Body):
    """`POST /v1/chat/completions`, into which the other protocols are translated. Unknown fields are ignored, as OpenAI
    does."""

    messages: list[dict[str, Any]] = Field(min_length=1)
    model: str = ""
    tools: list[dict[str, Any]] | None = None
    tool_choice: Any = None
    n: int | None = Field(None, ge=1, le=MAX_CHOICES)
    stop: str | list[str] | None = None
    seed: int | None = None
    max_tokens: int | None = Field(None, ge=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    logprobs: bool | None = None
    top_logprobs: int | None = None
    stream: bool | None = None
    stream_options: _StreamOptions | None = None
    return_token_ids: bool | None = None
    temperature: float | None = None
    top_p: float | None = None

    @field_validator("messages")
    @classmethod
    def _are_text(cls, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
        try:
            return [plain(message, f"messages[{index}]") for index, message in enumerate(messages)]
        except UnreadableContent as error:
            raise unreadable(error) from error

    def sampling(self) -> RequestedSampling:
        stop = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())
        longest = self.max_completion_tokens if self.max_completion_tokens is not None else self.max_tokens
        return RequestedSampling(self.n or 1, longest, tuple(s for s in stop if s), (), self.seed)

    def overruled(self, temperature: float, top_p: float) -> list[str]:
        """Fields that ask for other sampling than the run's. With a greedy ticket (`temperature` 0) any temperature is
        accepted: it may be the one that the run trains at."""
        fields = {"temperature": (self.temperature, temperature or self.temperature), "top_p": (self.top_p, top_p)}
        return [name for name, (asked, used) in fields.items() if asked is not None and asked != used]


class TokenSampling(_Body):
    n: int = Field(1, ge=1, le=MAX_CHOICES)
    max_tokens: int | None = Field(None, ge=1)
    stop_token_ids: list[int] | None = None
    stop: str | list[str] | None = None
    seed: int | None = None


class TokenBody(_Body):
    """vLLM's `POST /inference/v1/generate`."""

    token_ids: list[int] = Field(min_length=1)
    sampling_params: TokenSampling = TokenSampling()
    request_id: str = ""
    stream: bool | None = None

    @field_validator("token_ids")
    @classmethod
    def _are_ids(cls, ids: list[int]) -> list[int]:
        if min(ids) < 0:
            raise ValueError("token_ids must not contain negative values")
        return ids

    def sampling(self) -> RequestedSampling:
        s = self.sampling_params
        stop = (s.stop,) if isinstance(s.stop, str) else tuple(s.stop or ())
        return RequestedSampling(s.n, s.max_tokens, tuple(t for t in stop if t), tuple(s.stop_token_ids or ()), s.seed)


Neutral = Mapping[str, tuple[Any, ...]]
"""Fields, each with the values that are harmless."""

_NEUTRAL: Neutral = {
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "repetition_penalty": (1,),
    "logit_bias": ({},),
    "functions": ([],),
    "top_logprobs": (0,),
    "prompt_logprobs": (0,),
    "audio": (),
    "min_p": (0,),
    "top_k": (0, -1),
}
"""Fields that change the sampling distribution, or need what no engine offers."""

CONSTRAINING: Neutral = {
    "response_format": ({"type": "text"},),
    "tool_choice": ("auto", "none"),
    "guided_json": (),
    "guided_regex": (),
    "guided_choice": (),
    "guided_grammar": (),
    "structured_outputs": (),
}
"""Fields that constrain the form of the reply; the last five are vLLM's."""


def read_chat(body: bytes) -> ChatBody:
    """Raises BadRequest."""
    return _permitted(_valid(lambda: ChatBody.model_validate_json(body), {}))


def chat_of(fields: Mapping[str, Any], names: Mapping[str, str]) -> ChatBody:
    """A request that another protocol translated into `fields`. `names`: its own names of fields, for errors.

    Raises BadRequest.
    """
    return _permitted(_valid(lambda: ChatBody.model_validate(fields), names))


def _permitted(chat: ChatBody) -> ChatBody:
    _refuse({name: getattr(chat, name, None) for name in _NEUTRAL}, _NEUTRAL)
    return chat


def read_tokens(body: bytes, vocabulary: int) -> TokenBody:
    """Raises BadRequest."""
    tokens = _valid(lambda: TokenBody.model_validate_json(body), {})
    _refuse(tokens.sampling_params.model_dump(exclude_unset=True), {**_NEUTRAL, **CONSTRAINING})
    if tokens.stream:
        raise BadRequest("the token endpoint does not stream: ask without `stream`", param="stream")
    if tokens.sampling_params.stop:
        raise BadRequest("the token endpoint does not decode text: use stop_token_ids", param="sampling_params.stop")
    ends = tokens.sampling_params.stop_token_ids or []
    for name, ids in (("token_ids", tokens.token_ids), ("sampling_params.stop_token_ids", ends)):
        if wrong := [id for id in ids if not 0 <= id < vocabulary]:
            raise BadRequest(f"{name} holds {wrong[0]}; the tokenizer has {vocabulary} tokens", param=name)
    return tokens


def unreadable(error: UnreadableContent) -> BadRequest:
    return BadRequest(str(error), param=error.field, code="unsupported_content")


def _refuse(given: Mapping[str, Any], neutral_values: Neutral) -> None:
    for name, neutral in neutral_values.items():
        value = given.get(name)
        if value is not None and value not in neutral:
            raise BadRequest(
                f"{name} is {value!r}, which this endpoint cannot honour: what it samples is trained on, so it samples "
                "as the run is configured. Leave the field out.",
                param=name,
                code="unsupported_value",
            )


def _valid(read: Callable[[], B], names: Mapping[str, str]) -> B:
    try:
        return read()
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        inner, *rest = [str(part) for part in first["loc"]] or [""]
        field = ".".join((names.get(inner, inner), *rest))
        text = first["msg"].removeprefix("Value error, ")
        raise BadRequest(f"{field}: {text}" if field else text, param=field or None) from error


def plain(message: Any, field: str = "message") -> Message:
    """A message in the form that chat templates expect: text content, arguments as a dict if possible, known keys only.

    `field`: where the message stands in the request. Raises ValueError for what no chat template of a language model
    accepts.

    >>> plain({"role": "user", "content": [{"type": "text", "text": "Hi"}], "name": None})
    {'role': 'user', 'content': 'Hi'}
    """
    role = message.get("role")
    if not isinstance(role, str):
        raise ValueError(f"a message has role {role!r}; expected a text")
    if problem := unknown_role([message], None):
        raise ValueError(problem)
    # `developer` is OpenAI's new name of `system`; no open model's template knows it.
    content = text_of(message.get("content"), f"{field}.content")
    copied: Message = {"role": "system" if role == "developer" else role, "content": content}
    for name in ("name", "tool_call_id", "reasoning_content"):
        if isinstance(message.get(name), str):
            copied[name] = message[name]
    if calls := message.get("tool_calls"):
        copied["tool_calls"] = [_plain_call(call) for call in calls]
    return copied


def _plain_call(call: Any) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise ValueError("each of tool_calls needs a function with a name")
    arguments = arguments_of(call)
    raw = function.get("arguments", "")
    return {
        "id": str(call.get("id", "")),
        "type": "function",
        "function": {"name": function["name"], "arguments": raw if arguments is None else arguments},
    }
