"""Parses requests of OpenAI's API.

https://platform.openai.com/docs/api-reference
"""

from typing import Any

from jaxpaged import SamplingParams
from lib.api_error import ApiError
from lib.fields import Fields, is_whole
from lib.openai_fields import NEUTRAL, NEUTRAL_IN_CHAT, NEUTRAL_IN_TEXT, refuse_unread
from lib.openai_grammars import read_grammar
from lib.openai_logits import read_bad_words, read_logit_params, read_min_tokens
from lib.openai_messages import check_unicode, read_conversation
from lib.openai_tools import read_tools
from lib.service import Service

MOST_N, MOST_PROMPTS, MOST_STOPS, MOST_STOP_CHARACTERS, MOST_STOP_IDS = 16, 64, 32, 200, 16
NO_TOOL_FORMAT = (
    'is supported only with tool_choice "none": the chat template has no known form of tool calls; '
    "start the server with --tool-call-parser"
)
USUAL_TOKENS = 16  # default of max_tokens in a completion


class Ask:
    """A parsed request. Raises `ApiError`, `FieldError` and `MissingFieldError`.

    Attributes:
        model: name of the adapter, or the model's first name.
        conversation: the conversation of a chat, with its tools; None in a completion.
        tool_use: the tools of a chat; None in a completion.
        grammar: the grammar of the answer; None: any text.
        prompts: texts or token ids; empty in a chat.
        prompt_field: field of the request with the prompt, for errors.
        is_echoed: whether an answer begins with its prompt.
        max_tokens: None: not set. 0: only echo the prompts.
        min_tokens: minimum number of new tokens.
        bad_words: texts that the answer must not contain.
        params: sampling parameters, without `max_tokens`, `min_tokens`, `bad_words`, `grammar` and the model's
            end-of-text tokens.
        stops: stop strings.
        includes_usage: whether a stream ends with the usage.
        has_usage_in_chunks: whether every chunk has the usage.
        includes_stop: whether the text includes the stop string or stop token that ended it.
        returns_ids: whether the answer includes token ids.
    """

    def __init__(self, fields: Fields, service: Service, *, is_chat: bool):
        self.is_chat = is_chat
        self.model, adapter = read_model(fields, service)
        other, path = ("prompt", "/v1/completions") if is_chat else ("messages", "/v1/chat/completions")
        if fields.values.get(other) is not None:
            raise fields.error(other, f"is not supported here: send it to {path}")
        vocab_size = service.checkpoint.config.vocab_size
        self.tool_use = read_tools(fields) if is_chat else None
        if self.tool_use is not None and self.tool_use.callable_names and service.tool_format is None:
            raise fields.error("tools", NO_TOOL_FORMAT)
        self.grammar = read_grammar(
            fields, self.tool_use, service.tool_format, has_vocabulary=service.vocabulary is not None
        )
        self.conversation = None
        if self.tool_use is not None:
            self.conversation = read_conversation(fields) | {"tools": self.tool_use.tools or None}
        self.prompt_field = "messages" if is_chat else "prompt"
        self.prompts = [] if is_chat else _prompts(fields, vocab_size)
        self.adds_special_tokens = is_chat or fields.flag("add_special_tokens", True)
        self.is_echoed = not is_chat and fields.flag("echo", False)
        self.max_tokens = _max_tokens(fields, 0 if self.is_echoed else 1, is_chat)
        self.min_tokens = read_min_tokens(fields, self.max_tokens)
        self.bad_words = read_bad_words(fields)
        has_logprobs, top_logprobs = _logprobs(fields, is_chat, service.max_logprobs)
        self.params = SamplingParams(
            n=fields.whole("n", 1, MOST_N, 1),
            **_sampling(fields, vocab_size, service.sampling_defaults),
            **read_logit_params(fields, vocab_size),
            seed=_seed(fields),
            stop_token_ids=_stop_ids(fields, vocab_size),
            logprobs=has_logprobs,
            prompt_logprobs=has_logprobs and self.is_echoed,
            top_logprobs=top_logprobs,
            adapter=adapter,
        )
        self.stops = _stops(fields)
        self.includes_stop = fields.flag("include_stop_str_in_output", False)
        self.ignores_eos = fields.flag("ignore_eos", False)
        self.skips_special_tokens = fields.flag("skip_special_tokens", True)
        self.returns_ids = fields.flag("return_token_ids", False)
        self.is_streamed = fields.flag("stream", False)
        options = Fields(fields.get("stream_options", {}), "stream_options.")
        if options.values and not self.is_streamed:
            raise fields.error("stream_options", "goes with stream")
        self.includes_usage = options.flag("include_usage", False)
        self.has_usage_in_chunks = options.flag("continuous_usage_stats", False)
        refuse_unread(fields, NEUTRAL | (NEUTRAL_IN_CHAT if is_chat else NEUTRAL_IN_TEXT))


def read_model(fields: Fields, service: Service) -> tuple[str, int | None]:
    """Name and adapter of the requested model, by default the first. Raises `ApiError`."""
    names, first = service.names, service.served_names[0]
    named = fields.text("model", first)
    if named not in names:
        message = f"The model {named[:100]!r} does not exist here; there is {', '.join(map(repr, names))}."
        raise ApiError(404, message, param="model", code="model_not_found")
    adapter = names[named]
    return (first if adapter is None else named), adapter


def _sampling(fields: Fields, vocab_size: int, defaults: dict[str, float]) -> dict[str, Any]:
    given = {
        "temperature": fields.real("temperature", 0, 2, 1),
        "top_p": max(fields.real("top_p", 0, 1, 1), 1e-30),  # 0: nearly always the most likely token
        "top_k": max(fields.whole("top_k", -1, vocab_size, 0), 0),  # -1 and 0: all tokens
        "min_p": fields.real("min_p", 0, 1, 0),
    }
    return given | {name: value for name, value in defaults.items() if fields.get(name, None) is None}


def _seed(fields: Fields) -> int | None:
    """The engine's 32-bit seed for a client's 64-bit seed."""
    return None if fields.get("seed", None) is None else fields.whole("seed", -(2**63), 2**63 - 1) % 2**32


def _max_tokens(fields: Fields, least: int, is_chat: bool) -> int | None:
    names = ("max_tokens", "max_completion_tokens") if is_chat else ("max_tokens",)
    return min((fields.whole(n, least, 2**31 - 1) for n in names if fields.get(n, None) is not None), default=None)


def _logprobs(fields: Fields, is_chat: bool, max_logprobs: int) -> tuple[bool, int]:
    """Whether the request wants logprobs, and for how many of the most likely tokens."""
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


def _stops(fields: Fields) -> list[str]:
    clause = f"must be a text or at most {MOST_STOPS} texts, each of 1 to {MOST_STOP_CHARACTERS} characters"
    return fields.items(
        "stop", lambda stop: isinstance(stop, str) and 0 < len(stop) <= MOST_STOP_CHARACTERS, clause, MOST_STOPS
    )


def _stop_ids(fields: Fields, vocab_size: int) -> tuple[int, ...]:
    clause = f"must be at most {MOST_STOP_IDS} token ids from 0 to {vocab_size - 1}"
    ids = fields.items(
        "stop_token_ids", lambda token: is_whole(token) and 0 <= token < vocab_size, clause, MOST_STOP_IDS
    )
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
