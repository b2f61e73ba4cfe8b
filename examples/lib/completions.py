"""The routes that generate text. Each reads a request, sends it to the engines, and answers it at once or as a
stream."""

import asyncio
import contextlib
import dataclasses
import functools
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any, Protocol

from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from jaxpaged import SamplingParams
from lib.answer_start import AnswerStart
from lib.api_error import ApiError
from lib.chat_template import ChatTemplateError, RendererBusyError
from lib.middleware import DETAILS, REQUEST_ID
from lib.openai_answers import Answer
from lib.openai_forms import USUAL_TOKENS, Ask
from lib.openai_grammars import compile_grammar
from lib.openai_logits import check_num_listed, encode_bad_words
from lib.pieces import Pieces
from lib.service import RETRY_SECONDS, Service
from lib.template_history import adapt_history

COMMENT = "jaxpaged.comment"  # in the scope of a stream: bytes between its chunks that clients skip


class AnyAnswer(Protocol):
    """The answer to a request in the form of one API."""

    async def whole(self) -> dict[str, Any]:
        """The answer at once."""
        ...

    def events(self) -> AsyncIterator[str]:
        """The answer as server-sent events."""
        ...


async def complete(service: Service, request: Request, *, is_chat: bool) -> Response:
    begin = time.perf_counter()
    ask = Ask(await service.read_fields(request), service, is_chat=is_chat)
    return await generate(service, request, ask, begin, lambda pieces: Answer(pieces, request.scope[REQUEST_ID]))


async def generate(
    service: Service, request: Request, ask: Ask, begin: float, make_answer: Callable[[Pieces], AnyAnswer]
) -> Response:
    num_completions, most = max(1, len(ask.prompts)) * ask.params.n, service.engines.most_completions
    if num_completions > most:
        raise ApiError(400, f"A request has at most {most} completions here; got {num_completions}.", param="n")
    with contextlib.ExitStack() as ending:
        ending.enter_context(service.adapters.using(ask.params.adapter))
        generation = service.engines.open(num_completions)
        ending.callback(service.engines.close, generation)
        prompts = await unless_gone(request, asyncio.to_thread(encode, service, ask))
        params = await unless_gone(request, asyncio.to_thread(complete_params, service, ask, prompts[0]))
        requests = [(p, dataclasses.replace(params, **limits(service, ask, p))) for p in prompts]
        service.engines.start(generation, requests)
        pieces = Pieces(service, ask, generation, begin)
        request.scope[DETAILS] = pieces.describe
        answer = make_answer(pieces)
        if not ask.is_streamed:
            return JSONResponse(await unless_gone(request, answer.whole()))
        return EventStream(answer.events(), on_end=ending.pop_all().close)


def encode(service: Service, ask: Ask) -> list[list[int]]:
    """The tokens of each prompt. Runs in a thread, because long prompts and templates are slow."""
    if ask.conversation is not None:
        return [encode_conversation(service, ask.conversation)]
    encode_text = functools.partial(service.checkpoint.tokenizer.encode, add_special_tokens=ask.adds_special_tokens)
    return [encode_text(prompt) if isinstance(prompt, str) else prompt for prompt in ask.prompts]


def encode_conversation(service: Service, conversation: dict[str, Any]) -> list[int]:
    """Raises `ApiError`."""
    tokenizer = service.checkpoint.tokenizer
    if tokenizer.chat_template is None:
        raise ApiError(400, "This model has no chat template; use /v1/completions.")
    options = conversation | {"allow_control_tokens": service.allow_control_tokens}
    messages = adapt_history(options.pop("messages"), tokenizer.chat_template)
    try:
        (tokens,) = tokenizer.encode_conversations([messages], **options)
    except ChatTemplateError as error:
        raise ApiError(400, str(error), param="messages") from error
    except RendererBusyError as error:
        raise ApiError(503, str(error), code="overloaded", retry_after=RETRY_SECONDS) from error
    return tokens


def complete_params(service: Service, ask: Ask, prompt: list[int]) -> SamplingParams:
    """The parameters with stop tokens, the tokens of bad words, and the grammar. Raises `ApiError`."""
    tokenizer = service.checkpoint.tokenizer
    eos_ids = () if ask.ignores_eos else tokenizer.eos_ids
    stop_token_ids = tuple({*eos_ids, *ask.params.stop_token_ids})
    bad_words = encode_bad_words(tokenizer, ask.bad_words)
    params = dataclasses.replace(ask.params, stop_token_ids=stop_token_ids, bad_words=bad_words)
    check_num_listed(params)
    if ask.grammar is None or service.vocabulary is None:
        return params
    # A completion has no reasoning: its grammar begins with the first token.
    options = dict(prompt_ids=prompt, splits=service.splits_reasoning) if ask.is_chat else dict(splits=False)
    start = AnswerStart(service.vocabulary, tokenizer, **options)
    return dataclasses.replace(params, grammar=compile_grammar(ask.grammar, start))


def limits(service: Service, ask: Ask, prompt: list[int]) -> dict[str, Any]:
    """`max_tokens` and `min_tokens` of a prompt. Raises `ApiError`."""
    max_tokens = num_new(service, ask, prompt)
    if ask.min_tokens > max_tokens:
        message = f"min_tokens must be at most max_tokens, which is {max_tokens} here; got {ask.min_tokens}."
        raise ApiError(400, message, param="min_tokens")
    return dict(max_tokens=max_tokens, min_tokens=ask.min_tokens)


def num_new(service: Service, ask: Ask, prompt: list[int]) -> int:
    """Maximum number of new tokens; at least one, which the engine generates even for an echo. Raises `ApiError`."""
    if not prompt:
        raise ApiError(400, "The prompt holds no token.", param="prompt")
    most, name = service.max_model_len, ask.prompt_field
    room = most - len(prompt)
    usual = room if ask.is_chat else min(room, USUAL_TOKENS)
    num_new = max(usual if ask.max_tokens is None else ask.max_tokens, 1)
    if num_new > room:
        message = f"The prompt has {len(prompt)} tokens and asks for {num_new} more; a request has at most {most} "
        raise ApiError(400, f"{message}together here.", param=name, code="context_length_exceeded")
    return num_new


class EventStream(StreamingResponse):
    """Streams server-sent events. `on_end` is always called at the end, even if the client disconnects."""

    def __init__(self, content: AsyncIterator[str], *, on_end: Callable[[], None]):
        super().__init__(content, media_type="text/event-stream", headers={"Cache-Control": "no-cache"})
        self._on_end = on_end

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        scope[COMMENT] = b":\n\n"
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._on_end()


async def unless_gone[Result](request: Request, work: Coroutine[Any, Any, Result]) -> Result:
    """Awaits the work. If the client disconnects, cancels it and raises `ClientDisconnect`."""
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(request.receive())  # the body was read, so this can only be a disconnect
    try:
        await asyncio.wait([task, gone], return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientDisconnect
        return task.result()
    finally:
        task.cancel()
        gone.cancel()
