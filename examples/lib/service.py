"""The routes of the server: a request is read, sent to the engine's thread, and answered whole or as a stream."""

import asyncio
import contextlib
import dataclasses
import functools
import math
import secrets
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import HTMLResponse, JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from jaxpaged import RequestOutput
from lib.chat_template import ChatTemplateError, RendererBusyError
from lib.checkpoint import Checkpoint
from lib.engine_metrics import metrics_text
from lib.engine_thread import DrainingError, EngineFailedError, EngineThread, Generation, QueueFullError
from lib.openai_answers import Answer, Piece, event, make_usage
from lib.openai_forms import USUAL_TOKENS, ApiError, Ask, read_ask
from lib.text_stream import TextStream

RETRY_SECONDS = 1
COMMENT = "jaxpaged.comment"  # in the scope of a stream: bytes between its chunks that clients skip
PAGE = Path(__file__).with_name("serve_page.html")
PAGE_POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'"


@dataclasses.dataclass
class Service:
    """What the routes share.

    Attributes:
        model: the model's name.
        adapters: the names of its adapters, by which a request takes one.
        max_length: the most tokens of a request, prompt and answer together.
        max_logprobs: the engine's.
        sampling_defaults: temperature, top_p and top_k of requests that do not set them.
    """

    engine: EngineThread
    checkpoint: Checkpoint
    model: str
    max_length: int
    adapters: tuple[str, ...] = ()
    api_key: str | None = None
    max_logprobs: int = 0
    max_body_bytes: int = 2**20
    allow_control_tokens: bool = False
    sampling_defaults: dict[str, float] = dataclasses.field(default_factory=dict)

    def app(self) -> Starlette:
        routes = [
            Route("/v1/completions", self.complete, methods=["POST"]),
            Route("/v1/chat/completions", self.chat, methods=["POST"]),
            Route("/v1/models", self.models),
            Route("/v1/models/{model}", self.models),
            Route("/health", self.health),
            Route("/metrics", self.metrics),
            Route("/", self.page),
        ]
        handlers: dict[Any, Any] = {
            ApiError: refuse,
            QueueFullError: refuse_for_now,
            DrainingError: refuse_for_now,
            ClientDisconnect: lambda request, error: Response(status_code=499),  # never read
            HTTPException: refuse_path,
            EngineFailedError: lambda request, error: refuse(request, ApiError(500, str(error))),
            Exception: lambda request, error: refuse(request, ApiError(500, "The server failed.")),
        }

        @contextlib.asynccontextmanager
        async def lifespan(app: Starlette) -> AsyncIterator[None]:
            async with self.engine.running():
                yield

        return Starlette(routes=routes, exception_handlers=handlers, lifespan=lifespan)

    async def complete(self, request: Request) -> Response:
        return await self._answer(request, is_chat=False)

    async def chat(self, request: Request) -> Response:
        return await self._answer(request, is_chat=True)

    async def models(self, request: Request) -> Response:
        self._check_key(request)
        every = [
            {"id": name, "object": "model", "created": 0, "owned_by": "jaxpaged"}
            for name in (self.model, *self.adapters)
        ]
        named = request.path_params.get("model")
        if named is None:
            return JSONResponse({"object": "list", "data": every})
        models = [model for model in every if model["id"] == named]
        if not models:
            raise ApiError(404, f"The model {named[:100]!r} does not exist here.", code="model_not_found")
        return JSONResponse(models[0])

    async def health(self, request: Request) -> Response:
        is_draining = self.engine.is_draining
        return JSONResponse({"status": "draining" if is_draining else "ok"}, 503 if is_draining else 200)

    async def metrics(self, request: Request) -> Response:
        return PlainTextResponse(metrics_text(self.engine), media_type="text/plain; version=0.0.4")

    async def page(self, request: Request) -> Response:
        return HTMLResponse(PAGE.read_text(), headers={"Content-Security-Policy": PAGE_POLICY})

    async def _answer(self, request: Request, *, is_chat: bool) -> Response:
        self._check_key(request)
        body = await self._body(request)
        ask = read_ask(
            body,
            model=self.model,
            adapters=self.adapters,
            is_chat=is_chat,
            vocab_size=self.checkpoint.config.vocab_size,
            max_logprobs=self.max_logprobs,
        )
        num_completions = max(1, len(ask.prompts)) * ask.params.n
        if num_completions > self.engine.most_completions:
            most = self.engine.most_completions
            raise ApiError(400, f"A request has at most {most} completions here; got {num_completions}.")
        with contextlib.ExitStack() as ending:
            generation = self.engine.open(num_completions)
            ending.callback(self.engine.close, generation)
            prompts = await unless_gone(request, asyncio.to_thread(self._encode, ask))
            params = dataclasses.replace(ask.params, stop_token_ids=self.checkpoint.tokenizer.eos_ids)
            requests = [(p, dataclasses.replace(params, max_tokens=max(self._num_new(ask, p), 1))) for p in prompts]
            self.engine.start(generation, requests)
            usage = make_usage(sum(map(len, prompts)))
            answer = Answer(ask, num_completions, usage)
            pieces = self._pieces(ask, generation, usage)
            if not ask.is_streamed:
                return JSONResponse(await unless_gone(request, answer.whole(pieces)))
            return EventStream(events(answer, pieces), on_end=ending.pop_all().close)

    def _check_key(self, request: Request) -> None:
        if self.api_key is None:
            return
        scheme, _, key = request.headers.get("authorization", "").encode("latin-1").partition(b" ")
        if scheme.lower() != b"bearer" or not secrets.compare_digest(key.strip(), self.api_key.encode()):
            raise ApiError(401, "The API key is missing or wrong.", code="invalid_api_key")

    async def _body(self, request: Request) -> bytes:
        # Also keeps out other web pages, whose scripts may not send this type across origins.
        if request.headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
            raise ApiError(415, "The Content-Type must be application/json.")
        body = bytearray()
        async for part in request.stream():
            body += part
            if len(body) > self.max_body_bytes:
                raise ApiError(413, f"The body must be at most {self.max_body_bytes} bytes.")
        return bytes(body)

    def _encode(self, ask: Ask) -> list[list[int]]:
        """The tokens of each prompt. Runs in a thread, because it may take a while."""
        tokenizer = self.checkpoint.tokenizer
        if not ask.is_chat:
            return [tokenizer.encode(prompt) if isinstance(prompt, str) else prompt for prompt in ask.prompts]
        if tokenizer.chat_template is None:
            raise ApiError(400, "This model has no chat template; use /v1/completions.")
        try:
            return tokenizer.encode_conversations([ask.messages], allow_control_tokens=self.allow_control_tokens)
        except ChatTemplateError as error:
            raise ApiError(400, str(error), param="messages") from error
        except RendererBusyError as error:
            raise ApiError(503, str(error), code="overloaded", retry_after=RETRY_SECONDS) from error

    def _num_new(self, ask: Ask, prompt: list[int]) -> int:
        """The most new tokens of a prompt."""
        if not prompt:
            raise ApiError(400, "The prompt holds no token.", param="prompt")
        room = self.max_length - len(prompt)
        usual = room if ask.is_chat else min(room, USUAL_TOKENS)
        num_new = usual if ask.max_tokens is None else ask.max_tokens
        if room < max(num_new, 1):
            message = f"The prompt has {len(prompt)} tokens and asks for {max(num_new, 1)} more; a request has at most "
            raise ApiError(400, f"{message}{self.max_length} together here.", code="context_length_exceeded")
        return num_new

    async def _pieces(self, ask: Ask, generation: Generation, usage: dict[str, int]) -> AsyncIterator[Piece]:
        """Yields pieces as they arrive, and counts their tokens in `usage`."""
        tokenizer = self.checkpoint.tokenizer
        has_offsets = ask.params.logprobs and not ask.is_chat
        texts = [TextStream(tokenizer, ask.stops, has_offsets=has_offsets) for _ in range(generation.num_completions)]
        open_ones = set(range(generation.num_completions))
        echoes: dict[int, Piece] = {}  # what completions begin with
        async for i, output in generation.outputs():
            if ask.params.prompt_logprobs and not (output.finished or is_scored(output)):
                continue  # another output follows, which has what this one has
            for k, completion in enumerate(output.outputs):
                index = i * ask.params.n + k
                if index not in open_ones:
                    continue
                piece = Piece(index)
                if ask.is_echoed and index not in echoes:
                    echoes[index] = self._echo(ask, generation.requests[i][0], output)
                    piece.add(echoes[index])
                text = texts[index]
                start = text.num_tokens
                token_ids = completion.token_ids if ask.max_tokens != 0 else []  # the engine makes one
                piece.text += text.extend(token_ids, is_last=completion.finish_reason is not None)
                piece.finish_reason = "stop" if text.is_stopped else completion.finish_reason
                if ask.max_tokens == 0 and piece.finish_reason == "stop":
                    piece.finish_reason = "length"
                if piece.finish_reason is not None:
                    open_ones.remove(index)
                if completion.finish_reason is None and text.is_stopped:
                    self.engine.end(generation, i, k)
                usage["completion_tokens"] += text.num_tokens - start
                usage["total_tokens"] += text.num_tokens - start
                if completion.logprobs is not None:
                    new = slice(start, text.num_tokens)
                    before = len(echoes[index].text) if ask.is_echoed else 0
                    top_logprobs = completion.top_logprobs and completion.top_logprobs[new]
                    self._add_tokens(piece, token_ids[new], completion.logprobs[new], top_logprobs)
                    piece.offsets += [before + offset for offset in text.offsets[start:]]
                if piece.text or piece.finish_reason or piece.tokens:
                    yield piece
            if not open_ones:
                return

    def _echo(self, ask: Ask, prompt: list[int], output: RequestOutput) -> Piece:
        """The prompt, as its tokens are decoded."""
        text = TextStream(self.checkpoint.tokenizer, has_offsets=ask.params.logprobs)
        piece = Piece(0, text.extend(prompt, is_last=True))
        if output.prompt_logprobs is not None:
            logprobs = [None if p is None or math.isnan(p) else p for p in output.prompt_logprobs]
            self._add_tokens(piece, prompt, logprobs, output.prompt_top_logprobs)
            piece.offsets += text.offsets
        return piece

    def _add_tokens(
        self,
        piece: Piece,
        token_ids: list[int],
        logprobs: Sequence[float | None],
        top_logprobs: Sequence[dict[int, float] | None] | None,
    ) -> None:
        piece.tokens += map(self._text_of, token_ids)
        piece.logprobs += logprobs
        for likely in top_logprobs or ():
            piece.top_logprobs.append([(self._text_of(token), logprob) for token, logprob in (likely or {}).items()])

    @functools.cached_property
    def _text_of(self) -> Callable[[int], str]:
        """The text of a token by itself."""
        return functools.cache(lambda token: self.checkpoint.tokenizer.decode([token]))


def is_scored(output: RequestOutput) -> bool:
    """Whether the logprobs of all of the prompt's tokens are there: those of the last come last."""
    assert output.prompt_logprobs is not None
    last = output.prompt_logprobs[-1]
    return last is None or not math.isnan(last)


class EventStream(StreamingResponse):
    """Server-sent events. `on_end` is always called in the end, even if the client leaves."""

    def __init__(self, content: AsyncIterator[str], *, on_end: Callable[[], None]):
        super().__init__(content, media_type="text/event-stream", headers={"Cache-Control": "no-cache"})
        self._on_end = on_end

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        scope[COMMENT] = b":\n\n"
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._on_end()


async def events(answer: Answer, pieces: AsyncIterator[Piece]) -> AsyncIterator[str]:
    try:
        async for chunk in answer.chunks(pieces):
            yield event(chunk)
    except EngineFailedError as error:
        yield event(ApiError(500, str(error)).body())
    else:
        yield "data: [DONE]\n\n"


async def unless_gone[Result](request: Request, work: Coroutine[Any, Any, Result]) -> Result:
    """The result of the work. Cancels it and raises `ClientDisconnect` if the client leaves."""
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(request.receive())  # the body was read, so this can only be the end
    try:
        await asyncio.wait([task, gone], return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientDisconnect
        return task.result()
    finally:
        task.cancel()
        gone.cancel()


def refuse(request: Request, error: ApiError) -> Response:
    return JSONResponse(error.body(), error.status, headers=error.headers)


def refuse_path(request: Request, error: HTTPException) -> Response:
    body = ApiError(error.status_code, f"{error.detail}.").body()
    return JSONResponse(body, error.status_code, headers=error.headers)


def refuse_for_now(request: Request, error: Exception) -> Response:
    if isinstance(error, QueueFullError):
        message = "Too many requests are under way; try again soon."
        return refuse(request, ApiError(429, message, code="queue_full", retry_after=RETRY_SECONDS))
    return refuse(request, ApiError(503, "The server is shutting down.", code="draining", retry_after=RETRY_SECONDS))
