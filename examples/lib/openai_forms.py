"""The forms of OpenAI's API: what a request may say.

https://platform.openai.com/docs/api-reference
"""

import dataclasses
import json
from collections.abc import Sequence
from typing import Any

from jaxpaged import SamplingParams
from lib.api_error import ApiError
from lib.fields import Fields

MOST_N, MOST_PROMPTS, MOST_STOPS, MOST_STOP_CHARACTERS = 16, 64, 4, 200
USUAL_TOKENS = 16  # of a completion that says no max_tokens
MOST_TOP_LOGPROBS, MOST_TOP_LOGPROBS_OF_CHAT = 5, 20

KNOWN = {"model", "n", "stream", "stream_options", "max_tokens", "temperature", "top_p", "top_k", "seed", "stop"}
KNOWN |= {"logprobs"}
KNOWN_OF_CHAT = KNOWN | {"messages", "max_completion_tokens", "top_logprobs"}
KNOWN_OF_TEXT = KNOWN | {"prompt", "echo"}
# These change no answer.
IGNORED = {"user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "parallel_tool_calls"}
# These would change it: only the values that change nothing are taken.
FIXED: dict[str, tuple[Any, ...]] = {
    "echo": (False,),
    "best_of": (1,),
    "suffix": ("",),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "logit_bias": ({},),
    "top_logprobs": (0,),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
}
# The roles of messages, and what the templates call them.
ROLES = {"developer": "system"} | {role: role for role in ("system", "user", "assistant")}


@dataclasses.dataclass(frozen=True)
class Ask:
    """What a client asks for.

    Attributes:
        prompts: texts or token ids; empty in a chat.
        messages: of a chat; empty in a completion.
        max_tokens: None: not said. 0: only the prompts are echoed.
        is_echoed: whether an answer begins with its prompt.
        params: without `max_tokens` and the stop ids.
        model: the model's name, or the adapter's.
    """

    prompts: list[str | list[int]]
    messages: list[dict[str, str]]
    max_tokens: int | None
    stops: tuple[str, ...]
    params: SamplingParams
    is_streamed: bool
    includes_usage: bool
    is_echoed: bool
    model: str

    @property
    def is_chat(self) -> bool:
        return bool(self.messages)


def read_ask(
    body: bytes,
    *,
    model: str,
    is_chat: bool,
    vocab_size: int,
    adapters: Sequence[str] = (),
    max_logprobs: int = 0,
) -> Ask:
    """The request, which may name the model or one of its adapters. `max_logprobs`: the engine's.

    Raises `ApiError` for a body that is not a valid request, or asks for something unsupported.
    """
    try:
        fields = Fields(json.loads(body))
    except (ValueError, RecursionError) as error:  # also of bytes that are no UTF-8, and numbers of too many digits
        raise ApiError(400, "The body must be a JSON object.") from error
    try:
        named = fields.text("model", model)
        if named not in (model, *adapters):
            message = (
                f"The model {named[:100]!r} does not exist here; there is {', '.join(map(repr, (model, *adapters)))}."
            )
            raise ApiError(404, message, param="model", code="model_not_found")
        _refuse_others(fields, KNOWN_OF_CHAT if is_chat else KNOWN_OF_TEXT)
        is_streamed = fields.flag("stream", False)
        options = Fields(fields.get("stream_options", {}))
        if options.values and not is_streamed:
            raise ValueError("stream_options goes with stream")
        is_echoed = not is_chat and fields.flag("echo", False)
        has_logprobs, top_logprobs = _logprobs(fields, is_chat, max_logprobs)
        return Ask(
            prompts=[] if is_chat else _prompts(fields, vocab_size),
            messages=_messages(fields) if is_chat else [],
            max_tokens=_max_tokens(fields, 0 if is_echoed else 1),
            stops=_stops(fields),
            params=SamplingParams(
                n=fields.whole("n", 1, MOST_N, 1),
                temperature=fields.real("temperature", 0, 2, 1),
                top_p=max(fields.real("top_p", 0, 1, 1), 1e-30),  # 0: the most likely token, as near as can be
                top_k=max(fields.whole("top_k", -1, vocab_size, 0), 0),  # -1: all, as 0 is
                seed=_seed(fields),
                logprobs=has_logprobs,
                prompt_logprobs=has_logprobs and is_echoed,
                top_logprobs=top_logprobs,
                adapter=None if named == model else adapters.index(named),
            ),
            is_streamed=is_streamed,
            includes_usage=options.flag("include_usage", False),
            is_echoed=is_echoed,
            model=named,
        )
    except KeyError as error:
        raise ApiError(400, f"The field {error} is missing.", param=error.args[0]) from error
    except ValueError as error:
        raise ApiError(400, f"{str(error).rstrip('.')}.") from error


def _refuse_others(fields: Fields, known: set[str]) -> None:
    for name, value in fields.values.items():
        if name not in known | IGNORED and value is not None and value not in FIXED.get(name, ()):
            shown = name[:100] if name.isidentifier() else repr(name[:100])  # a name may hold anything
            raise ValueError(f"{shown} is not supported here; leave it out")


def _seed(fields: Fields) -> int | None:
    """The engine's seed of 32 bits for one of 64, as clients send them."""
    return None if fields.get("seed", None) is None else fields.whole("seed", -(2**63), 2**63 - 1) % 2**32


def _max_tokens(fields: Fields, least: int) -> int | None:
    most = [
        fields.whole(name, least, 2**31 - 1)
        for name in ("max_completion_tokens", "max_tokens")
        if fields.get(name, None) is not None
    ]
    return min(most, default=None)


def _logprobs(fields: Fields, is_chat: bool, max_logprobs: int) -> tuple[bool, int]:
    """Whether logprobs are asked for, and of how many of the most likely tokens beside."""
    if not is_chat:
        wants = fields.get("logprobs", None) is not None
        return wants, fields.whole("logprobs", 0, min(MOST_TOP_LOGPROBS, max_logprobs), 0)
    wants = fields.flag("logprobs", False)
    num_top = fields.whole("top_logprobs", 0, min(MOST_TOP_LOGPROBS_OF_CHAT, max_logprobs), 0)
    if num_top and not wants:
        raise ValueError("top_logprobs goes with logprobs: true")
    return wants, num_top


def _stops(fields: Fields) -> tuple[str, ...]:
    stops = fields.get("stop", [])
    stops = [stops] if isinstance(stops, str) else stops
    if (
        not isinstance(stops, list)
        or len(stops) > MOST_STOPS
        or not all(isinstance(stop, str) and 0 < len(stop) <= MOST_STOP_CHARACTERS for stop in stops)
    ):
        raise ValueError(
            f"stop must be a text or at most {MOST_STOPS} texts, each of 1 to {MOST_STOP_CHARACTERS} characters"
        )
    return tuple(stops)


def _prompts(fields: Fields, vocab_size: int) -> list[str | list[int]]:
    prompt = fields.get("prompt")
    prompts = prompt if isinstance(prompt, list) and prompt and not _is_id(prompt[0]) else [prompt]
    if len(prompts) > MOST_PROMPTS:
        raise ValueError(f"prompt must be at most {MOST_PROMPTS} prompts; got {len(prompts)}")
    for one in prompts:
        if isinstance(one, str):
            _check_text("prompt", one)
        elif not isinstance(one, list) or not one or not all(map(_is_id, one)):
            raise ValueError("prompt must be a text, a list of token ids, or a list of these")
        elif not all(0 <= token < vocab_size for token in one):
            raise ValueError(f"prompt must hold token ids from 0 to {vocab_size - 1}")
    return prompts


def _is_id(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _messages(fields: Fields) -> list[dict[str, str]]:
    messages = fields.get("messages")
    if not isinstance(messages, list) or not messages:
        raise ValueError("messages must be a list of at least one message")
    read = []
    for message in map(Fields, messages):
        role = message.text("role")
        if role not in ROLES:
            raise ValueError(f"role must be one of {', '.join(ROLES)}; got {role[:60]!r}")
        _refuse_others(message, {"role", "content", "name"})
        content = message.get("content")
        if isinstance(content, list):
            content = "".join(map(_text_of_part, content))
        if not isinstance(content, str):
            raise ValueError("content must be a text, or a list of parts of the type text")
        _check_text("content", content)
        read.append({"role": ROLES[role], "content": content})
    return read


def _text_of_part(part: Any) -> str:
    fields = Fields(part)
    if fields.text("type") != "text":
        raise ValueError("content must be a text, or a list of parts of the type text")
    return fields.text("text")


def _check_text(name: str, text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"{name} must be Unicode; it holds half of a surrogate pair") from error
