"""The forms of OpenAI's API: what a request may say.

https://platform.openai.com/docs/api-reference
"""

import dataclasses
import json
from collections.abc import Callable, Mapping
from typing import Any

from jaxpaged import SamplingParams
from lib.api_error import ApiError
from lib.fields import FieldError, Fields, MissingFieldError, is_whole
from lib.openai_fields import (
    NEUTRAL,
    NEUTRAL_IN_CHAT,
    NEUTRAL_IN_TEXT,
    READ,
    READ_IN_CHAT,
    READ_IN_TEXT,
    refuse_others,
)
from lib.openai_messages import Conversation, check_unicode, read_conversation

MOST_N, MOST_PROMPTS, MOST_STOPS, MOST_STOP_CHARACTERS, MOST_STOP_IDS = 16, 64, 32, 200, 16
USUAL_TOKENS = 16  # without max_tokens, in a completion


@dataclasses.dataclass(frozen=True)
class Ask:
    """A request.

    Attributes:
        prompts: texts or token ids; empty in a chat.
        conversation: of a chat; None in a completion.
        max_tokens: None: not said. 0: only the prompts are echoed.
        stops: stop strings.
        params: without `max_tokens` and the model's end-of-text tokens.
        model: the model's first name, or the adapter's.
        is_echoed: whether an answer begins with its prompt.
        includes_usage: whether a stream ends with the usage; `has_usage_in_chunks`: every chunk has it.
        includes_stop: whether the text includes the stop string or stop token that ended it.
        returns_ids: whether the answer includes token ids.
    """

    prompts: list[str | list[int]]
    conversation: Conversation | None
    max_tokens: int | None
    stops: tuple[str, ...]
    params: SamplingParams
    model: str
    is_streamed: bool = False
    is_echoed: bool = False
    includes_usage: bool = False
    has_usage_in_chunks: bool = False
    adds_special_tokens: bool = True
    ignores_eos: bool = False
    includes_stop: bool = False
    skips_special_tokens: bool = True
    returns_ids: bool = False

    @property
    def is_chat(self) -> bool:
        return self.conversation is not None


def read_form[Form](body: bytes, read: Callable[[Fields], Form]) -> Form:
    """Reads a JSON object with `read`. Raises `ApiError` if the body is none, or `read` refuses a field."""
    try:
        fields = Fields(json.loads(body))
    except (ValueError, RecursionError) as error:  # also of bytes that are no UTF-8, and numbers of too many digits
        raise ApiError(400, "The body must be a JSON object.") from error
    try:
        return read(fields)
    except MissingFieldError as error:
        raise ApiError(400, f"The field {error} is missing.", param=error.path) from error
    except FieldError as error:
        raise ApiError(400, f"{str(error).rstrip('.')}.", param=error.path) from error


def read_model(fields: Fields, names: Mapping[str, int | None]) -> tuple[str, int | None]:
    """The name and the adapter of the model that a request names, by default the first. Raises `ApiError`."""
    first = next(iter(names))
    named = fields.text("model", first)
    if named not in names:
        message = f"The model {named[:100]!r} does not exist here; there is {', '.join(map(repr, names))}."
        raise ApiError(404, message, param="model", code="model_not_found")
    adapter = names[named]
    return (first if adapter is None else named), adapter


def read_ask(
    body: bytes,
    *,
    names: Mapping[str, int | None],
    is_chat: bool,
    vocab_size: int,
    max_logprobs: int = 0,
    defaults: Mapping[str, float] | None = None,
) -> Ask:
    """The request.

    Args:
        body: JSON.
        names: what requests may name as their model; None for the model, or the number of an adapter.
        is_chat: whether it has messages instead of a prompt.
        vocab_size: the model's.
        max_logprobs: the engine's.
        defaults: of temperature, top_p and top_k.

    Raises:
        ApiError: the body is not a valid request, or has an unsupported field.
    """

    def read(fields: Fields) -> Ask:
        model, adapter = read_model(fields, names)
        if is_chat:
            refuse_others(fields, READ | READ_IN_CHAT, NEUTRAL | NEUTRAL_IN_CHAT)
        else:
            refuse_others(fields, READ | READ_IN_TEXT, NEUTRAL | NEUTRAL_IN_TEXT)
        is_streamed = fields.flag("stream", False)
        options = Fields(fields.get("stream_options", {}), "stream_options.")
        if options.values and not is_streamed:
            raise fields.error("stream_options", "goes with stream")
        is_echoed = not is_chat and fields.flag("echo", False)
        has_logprobs, top_logprobs = _logprobs(fields, is_chat, max_logprobs)
        return Ask(
            prompts=[] if is_chat else _prompts(fields, vocab_size),
            conversation=read_conversation(fields) if is_chat else None,
            max_tokens=_max_tokens(fields, 0 if is_echoed else 1),
            stops=_stops(fields),
            params=SamplingParams(
                n=fields.whole("n", 1, MOST_N, 1),
                **_sampling(fields, vocab_size, defaults or {}),
                seed=_seed(fields),
                stop_token_ids=_stop_ids(fields, vocab_size),
                logprobs=has_logprobs,
                prompt_logprobs=has_logprobs and is_echoed,
                top_logprobs=top_logprobs,
                adapter=adapter,
            ),
            model=model,
            is_streamed=is_streamed,
            is_echoed=is_echoed,
            includes_usage=options.flag("include_usage", False),
            has_usage_in_chunks=options.flag("continuous_usage_stats", False),
            adds_special_tokens=is_chat or fields.flag("add_special_tokens", True),
            ignores_eos=fields.flag("ignore_eos", False),
            includes_stop=fields.flag("include_stop_str_in_output", False),
            skips_special_tokens=fields.flag("skip_special_tokens", True),
            returns_ids=fields.flag("return_token_ids", False),
        )

    return read_form(body, read)


def _sampling(fields: Fields, vocab_size: int, defaults: Mapping[str, float]) -> dict[str, Any]:
    usual = dict(temperature=1.0, top_p=1.0, top_k=0, min_p=0.0) | dict(defaults)
    given = {
        "temperature": fields.real("temperature", 0, 2, 0),
        "top_p": max(fields.real("top_p", 0, 1, 0), 1e-30),  # 0: the most likely token, as near as can be
        "top_k": max(fields.whole("top_k", -1, vocab_size, 0), 0),  # -1: all, as 0 is
        "min_p": fields.real("min_p", 0, 1, 0),
    }
    return {name: usual[name] if fields.get(name, None) is None else value for name, value in given.items()}


def _seed(fields: Fields) -> int | None:
    """The engine's seed of 32 bits for one of 64, as clients send them."""
    return None if fields.get("seed", None) is None else fields.whole("seed", -(2**63), 2**63 - 1) % 2**32


def _max_tokens(fields: Fields, least: int) -> int | None:
    names = ("max_completion_tokens", "max_tokens")
    return min((fields.whole(n, least, 2**31 - 1) for n in names if fields.get(n, None) is not None), default=None)


def _logprobs(fields: Fields, is_chat: bool, max_logprobs: int) -> tuple[bool, int]:
    """Whether the request wants logprobs, and of how many of the most likely tokens."""
    name = "top_logprobs" if is_chat else "logprobs"
    number = fields.get(name, 0)
    if is_whole(number) and number > max_logprobs:
        clause = f"must be a whole number from 0 to {max_logprobs}, the server's --max-logprobs; got {number}"
        raise fields.error(name, clause)
    number = fields.whole(name, 0, max_logprobs, 0)
    if not is_chat:
        return fields.get("logprobs", None) is not None, number
    wants = fields.flag("logprobs", False)
    if number and not wants:
        raise fields.error("top_logprobs", "goes with logprobs: true")
    return wants, number


def _stops(fields: Fields) -> tuple[str, ...]:
    stops = fields.get("stop", [])
    stops = [stops] if isinstance(stops, str) else stops
    if (
        not isinstance(stops, list)
        or len(stops) > MOST_STOPS
        or not all(isinstance(stop, str) and 0 < len(stop) <= MOST_STOP_CHARACTERS for stop in stops)
    ):
        raise fields.error(
            "stop", f"must be a text or at most {MOST_STOPS} texts, each of 1 to {MOST_STOP_CHARACTERS} characters"
        )
    return tuple(stops)


def _stop_ids(fields: Fields, vocab_size: int) -> tuple[int, ...]:
    ids = fields.get("stop_token_ids", [])
    if (
        not isinstance(ids, list)
        or len(ids) > MOST_STOP_IDS
        or not all(is_whole(token) and 0 <= token < vocab_size for token in ids)
    ):
        raise fields.error("stop_token_ids", f"must be at most {MOST_STOP_IDS} token ids from 0 to {vocab_size - 1}")
    return tuple(ids)


def _prompts(fields: Fields, vocab_size: int) -> list[str | list[int]]:
    prompt = fields.get("prompt")
    prompts = prompt if isinstance(prompt, list) and prompt and not is_whole(prompt[0]) else [prompt]
    if len(prompts) > MOST_PROMPTS:
        raise fields.error("prompt", f"must be at most {MOST_PROMPTS} prompts; got {len(prompts)}")
    for one in prompts:
        if isinstance(one, str):
            check_unicode(fields, "prompt", one)
        else:
            check_ids(fields, "prompt", one, vocab_size, "a text, a list of token ids, or a list of these")
    return prompts


def check_ids(fields: Fields, name: str, ids: Any, vocab_size: int, wanted: str) -> None:
    if not isinstance(ids, list) or not ids or not all(map(is_whole, ids)):
        raise fields.error(name, f"must be {wanted}")
    if not all(0 <= token < vocab_size for token in ids):
        raise fields.error(name, f"must hold token ids from 0 to {vocab_size - 1}")
