"""A Llama, Mistral, Qwen, Gemma or gpt-oss behind an OpenAI-compatible HTTP server, on a `jaxpaged.Engine`.

    python examples/serve.py --port 8000
    curl localhost:8000/v1/chat/completions -H "Content-Type: application/json" -d '
        {"model": "SmolLM2-135M-Instruct.Q4_1", "messages": [{"role": "user", "content": "What is a page table?"}]}'

`lib/engine_thread.py` is the part to copy: the thread that owns the engine. This is HTTP around it; `docs/serving.md`.
"""

import argparse
import asyncio
import contextlib
import dataclasses
import functools
import os
import secrets
import signal
import socket
from collections.abc import AsyncIterator, Callable, Coroutine
from pathlib import Path
from types import FrameType
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import HTMLResponse, JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from jaxpaged import CacheCapacity, cache_capacity
from lib.checkpoint import Checkpoint, CheckpointError, default_path, load_model, read_checkpoint
from lib.command_line import (
    RequestError,
    add_tensor_parallel,
    checkpoint_arguments,
    matmul_precision,
    positive,
    run,
    say,
)
from lib.engine_llama import create_engine
from lib.engine_metrics import metrics_text
from lib.engine_thread import DrainingError, EngineFailedError, EngineThread, Generation, QueueFullError
from lib.llama import LlamaConfig
from lib.openai_forms import USUAL_TOKENS, Answer, ApiError, Ask, Piece, event, read_ask, usage_of
from lib.tensor_parallel import spread
from lib.text_stream import TextStream

API_KEY = "JAXPAGED_API_KEY"  # the environment variable
MOST_TOKENS = 2048  # of a request by default
RETRY_SECONDS = 1
PAGE = Path(__file__).parent / "lib" / "serve_page.html"
PAGE_POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'"
FLUSH_SECONDS = 5  # in which clients take the last of their answers


@dataclasses.dataclass
class Service:
    """What the routes share.

    Attributes:
        model: its name.
        max_length: the most of a request, prompt and answer together.
    """

    engine: EngineThread
    checkpoint: Checkpoint
    model: str
    max_length: int
    api_key: str | None = None
    max_body_bytes: int = 2**20
    allow_control_tokens: bool = False

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
            ClientDisconnect: lambda request, error: Response(status_code=499),  # nobody reads it
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
        model = {"id": self.model, "object": "model", "created": 0, "owned_by": "jaxpaged"}
        named = request.path_params.get("model")
        if named is None:
            return JSONResponse({"object": "list", "data": [model]})
        if named != self.model:
            raise ApiError(404, f"The model {named[:100]!r} does not exist here.", code="model_not_found")
        return JSONResponse(model)

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
        ask = read_ask(body, model=self.model, is_chat=is_chat, vocab_size=self.checkpoint.config.vocab_size)
        num_completions = max(1, len(ask.prompts)) * ask.params.n
        if num_completions > self.engine.most_completions:
            most = self.engine.most_completions
            raise ApiError(400, f"A request has at most {most} completions here; got {num_completions}.")
        with contextlib.ExitStack() as ending:
            generation = self.engine.open(num_completions)
            ending.callback(self.engine.close, generation)
            prompts = await unless_gone(request, asyncio.to_thread(self._encode, ask))
            params = dataclasses.replace(ask.params, stop_token_ids=self.checkpoint.tokenizer.eos_ids)
            requests = [(p, dataclasses.replace(params, max_tokens=self._num_new(ask, p))) for p in prompts]
            self.engine.start(generation, requests)
            usage = usage_of(sum(map(len, prompts)))
            answer = Answer(ask, self.model, num_completions, usage)
            pieces = self._pieces(ask, generation, usage)
            if not ask.is_streamed:
                return JSONResponse(await unless_gone(request, answer.whole(pieces)))
            return EventStream(events(answer, pieces), on_end=ending.pop_all().close)

    def _check_key(self, request: Request) -> None:
        given = request.headers.get("authorization", "").encode("latin-1")
        if self.api_key is not None and not secrets.compare_digest(given, f"Bearer {self.api_key}".encode()):
            raise ApiError(401, "The API key is missing or wrong.", code="invalid_api_key")

    async def _body(self, request: Request) -> bytes:
        # Also keeps web pages of others out, whose scripts cannot send this type without being asked for.
        if request.headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
            raise ApiError(415, "The Content-Type must be application/json.")
        body = bytearray()
        async for part in request.stream():
            body += part
            if len(body) > self.max_body_bytes:
                raise ApiError(413, f"The body must be at most {self.max_body_bytes} bytes.")
        return bytes(body)

    def _encode(self, ask: Ask) -> list[list[int]]:
        """The tokens of each prompt. In a thread: it may take a while."""
        tokenizer = self.checkpoint.tokenizer
        if not ask.is_chat:
            return [tokenizer.encode(prompt) if isinstance(prompt, str) else prompt for prompt in ask.prompts]
        if tokenizer.chat_template is None:
            raise ApiError(400, "This model has no chat template; use /v1/completions.")
        try:
            return tokenizer.encode_conversations([ask.messages], allow_control_tokens=self.allow_control_tokens)
        except CheckpointError as error:  # a template may refuse a conversation
            raise ApiError(400, str(error), param="messages") from error

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
        """What is new, as it comes; counted in `usage`."""
        decode = self.checkpoint.tokenizer.decode
        texts = [TextStream(decode, ask.stops) for _ in range(generation.num_completions)]
        open_ones = set(range(generation.num_completions))
        async for i, output in generation.outputs():
            for k, completion in enumerate(output.outputs):
                index = i * ask.params.n + k
                if index not in open_ones:
                    continue
                text = texts[index]
                start = text.num_tokens
                new = text.extend(completion.token_ids, is_last=completion.finish_reason is not None)
                reason = "stop" if text.is_stopped else completion.finish_reason
                if reason is not None:
                    open_ones.remove(index)
                if completion.finish_reason is None and text.is_stopped:
                    self.engine.end(generation, i, k)
                usage["completion_tokens"] += text.num_tokens - start
                usage["total_tokens"] += text.num_tokens - start
                piece = Piece(index, new, finish_reason=reason)
                if completion.logprobs is not None:
                    piece.tokens += [decode([token]) for token in completion.token_ids[start : text.num_tokens]]
                    piece.logprobs += completion.logprobs[start : text.num_tokens]
                    if not ask.is_chat:  # whose logprobs have no offsets
                        piece.offsets += text.offsets[start:]
                if new or reason or piece.tokens:
                    yield piece
            if not open_ones:
                return


class EventStream(StreamingResponse):
    """Server-sent events. `on_end` is called however it ends: the client may leave at any moment."""

    def __init__(self, content: AsyncIterator[str], *, on_end: Callable[[], None]):
        super().__init__(content, media_type="text/event-stream", headers={"Cache-Control": "no-cache"})
        self._on_end = on_end

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
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
    """The result of the work, which is given up when the client leaves. Raises `ClientDisconnect` then."""
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(request.receive())  # the body was read: nothing else can come
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
        message = "As many requests are under way as may be; try again soon."
        return refuse(request, ApiError(429, message, code="queue_full", retry_after=RETRY_SECONDS))
    return refuse(request, ApiError(503, "The server is shutting down.", code="draining", retry_after=RETRY_SECONDS))


class Server(uvicorn.Server):
    """Drains at SIGTERM and Ctrl-C: requests under way are finished, and new ones refused with 503.

    The process then ends with 0. A second signal ends it at once.
    """

    def __init__(self, service: Service, *, drain_seconds: float):
        options: dict[str, Any] = dict(loop="asyncio", http="h11", log_level="warning", access_log=False)
        super().__init__(uvicorn.Config(service.app(), timeout_graceful_shutdown=FLUSH_SECONDS, **options))
        self.engine, self.drain_seconds = service.engine, drain_seconds
        self.engine.on_failure = self._exit
        self.loop: asyncio.AbstractEventLoop | None = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.loop = asyncio.get_running_loop()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self.loop is None or self.engine.is_draining:
            self.should_exit = self.force_exit = True
        else:
            self.loop.call_soon_threadsafe(self._begin_to_drain)

    def _begin_to_drain(self) -> None:
        self._draining = asyncio.ensure_future(self.engine.drain(self.drain_seconds))
        self._draining.add_done_callback(lambda _: self._exit())
        say(f"Draining for at most {self.drain_seconds:g} seconds.")  # last: nobody may be there to read it

    def _exit(self) -> None:
        self.should_exit = True


def bind(host: str, port: int) -> socket.socket:
    """Raises `RequestError`."""
    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except (OSError, OverflowError) as error:
        listener.close()
        raise RequestError(f"The server cannot have --host {host} --port {port}: {error}.") from error
    return listener


def parse_arguments(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0], parents=[checkpoint_arguments()])
    parser.add_argument("--host", default="127.0.0.1", help="default: %(default)s, which only this machine reaches")
    parser.add_argument("--port", type=int, default=8000, help="0: a free one; default: %(default)s")
    parser.add_argument(
        "--api-key", help=f"that clients must show; default: ${API_KEY}, which other users of the machine cannot see"
    )
    parser.add_argument("--num-seats", type=positive, default=16, metavar="N", help="requests that run at once")
    parser.add_argument(
        "--max-length",
        type=positive,
        default=MOST_TOKENS,
        metavar="N",
        help="the most of a request, prompt and answer together; default: %(default)s, or the model's context",
    )
    pool = parser.add_mutually_exclusive_group()
    pool.add_argument(
        "--num-blocks", type=positive, help="blocks in the pool; default: what all seats need at --max-length"
    )
    pool.add_argument("--cache-mb", type=positive, metavar="N", help="memory of the pool in 10^6 bytes, all layers")
    parser.add_argument(
        "--chunk-tokens",
        type=positive,
        default=64,
        metavar="N",
        help="of prompts in one step; 256 to 512 suits a large model on a GPU; default: %(default)s",
    )
    parser.add_argument(
        "--steps-per-slice",
        type=positive,
        default=8,
        metavar="N",
        help="steps between two pieces of a stream; default: %(default)s",
    )
    add_tensor_parallel(parser)
    parser.add_argument("--prefix-cache", action="store_true", help="let requests share the blocks of equal beginnings")
    parser.add_argument(
        "--max-queue", type=positive, default=128, metavar="N", help="completions that may wait for a seat"
    )
    parser.add_argument("--max-body-bytes", type=positive, default=2**20, metavar="N", help="default: %(default)s")
    parser.add_argument(
        "--drain-seconds",
        type=positive,
        default=30,
        metavar="N",
        help="for requests under way, when the server is told to end; default: %(default)s",
    )
    args = parser.parse_args(arguments)
    args.api_key = args.api_key or os.environ.get(API_KEY) or None
    return args


def capacity_of(config: LlamaConfig, args: argparse.Namespace) -> CacheCapacity:
    """What fits into --cache-mb. Raises `RequestError`."""
    try:
        return cache_capacity(
            args.cache_mb * 10**6,
            [min(args.max_length, config.context)],
            num_layers=config.num_layers,
            num_kv_heads=max(config.num_kv_heads, args.tensor_parallel),  # fewer are repeated
            head_dim=config.head_dim,
            block_size=args.block_size,
            dtype=args.dtype,
        )
    except ValueError as error:
        raise RequestError(f"--cache-mb {args.cache_mb} is too small: {error}") from error


def create_service(args: argparse.Namespace) -> Service:
    """Loads the model and compiles the engine. Raises `CheckpointError`."""
    path = args.model or default_path()
    checkpoint = read_checkpoint(path)
    max_length, num_blocks = min(args.max_length, checkpoint.config.context), args.num_blocks
    if args.cache_mb is not None:
        capacity = capacity_of(checkpoint.config, args)
        num_blocks = capacity.num_blocks
        say(
            f"The cache takes {capacity.num_bytes / 1e6:,.1f} MB: {num_blocks:,} blocks for "
            f"{capacity.num_tokens:,} tokens, or {capacity.num_seqs:,} of the longest requests."
        )
    if num_blocks is not None:
        max_length = min(max_length, (num_blocks - 1) * args.block_size)
    if max_length < 2:
        raise RequestError("A request must have room for two tokens; pass a larger --max-length or --num-blocks.")
    load = functools.partial(load_model, checkpoint, args.dtype)
    model, config, mesh = spread(load, checkpoint.config, args.tensor_parallel)
    with matmul_precision(args):
        engine = create_engine(
            model,
            config,
            mesh=mesh,
            num_seats=args.num_seats,
            max_length=max_length,
            block_size=args.block_size,
            num_blocks=num_blocks,
            dtype=args.dtype,
            chunk_tokens=args.chunk_tokens,
            steps_per_slice=args.steps_per_slice,
            prefix_cache=args.prefix_cache,
            num_stop_ids=len(checkpoint.tokenizer.eos_ids),
            seed=secrets.randbits(32),
        )
    return Service(
        EngineThread(engine, most_completions=args.num_seats + args.max_queue),
        checkpoint,
        model=Path(path).stem if Path(path).is_file() else Path(path).resolve().name,
        max_length=max_length,
        api_key=args.api_key,
        max_body_bytes=args.max_body_bytes,
        allow_control_tokens=args.allow_control_tokens,
    )


def main(arguments: list[str] | None = None) -> int:
    args = parse_arguments(arguments)
    with bind(args.host, args.port) as listener:
        say("Loading the model and compiling the engine.")
        service = create_service(args)
        if args.api_key is None and args.host not in ("127.0.0.1", "::1", "localhost"):
            say(f"Warning: whoever reaches {args.host} can use this server; set ${API_KEY} to prevent that.")
        host = f"[{args.host}]" if ":" in args.host else args.host
        say(f"Serving {service.model} at http://{host}:{listener.getsockname()[1]}")
        signal.set_wakeup_fd(-1)  # from here on Ctrl-C drains; before, it ends the process at once
        Server(service, drain_seconds=args.drain_seconds).run([listener])
    if service.engine.failure is not None:
        say(f"The engine failed: {service.engine.failure}")
        return 1
    return 0


if __name__ == "__main__":
    run(main)
