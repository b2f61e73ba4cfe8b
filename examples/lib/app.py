"""The web application: its routes, and the responses to errors."""

import asyncio
import contextlib
import functools
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.routing import Route

import jaxpaged
from lib import model_routes, responses
from lib.api_error import ApiError
from lib.completions import complete
from lib.engine_metrics import report_work
from lib.engine_runner import EngineFailedError
from lib.engines import DrainingError, QueueFullError
from lib.fields import FieldError, MissingFieldError
from lib.middleware import REQUEST_ID_HEADER
from lib.service import RETRY_SECONDS, Service

PAGE = Path(__file__).with_name("serve_page.html")
PAGE_POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'"

REFUSALS: dict[type[Exception], ApiError] = {
    QueueFullError: ApiError(
        429, "Too many requests are under way; try again soon.", code="queue_full", retry_after=RETRY_SECONDS
    ),
    DrainingError: ApiError(503, "The server is shutting down.", code="draining", retry_after=RETRY_SECONDS),
    EngineFailedError: ApiError(500, "The engine failed."),
}
Handler = Callable[[Service, Request], Awaitable[Response]]


def create_app(service: Service) -> Starlette:
    def route(path: str, handler: Handler, method: str = "GET") -> Route:
        return Route(path, functools.partial(handler, service), methods=[method])

    routes = [
        route("/v1/completions", functools.partial(complete, is_chat=False), "POST"),
        route("/v1/chat/completions", functools.partial(complete, is_chat=True), "POST"),
        route("/v1/responses", responses.respond, "POST"),
        route("/v1/responses/{response}", responses.show_response),
        route("/v1/responses/{response}", responses.delete_response, "DELETE"),
        route("/v1/models", model_routes.list_models),
        route("/v1/models/{model:path}", model_routes.show_model),
        route("/tokenize", model_routes.tokenize, "POST"),
        route("/detokenize", model_routes.detokenize, "POST"),
        route("/version", version),
        route("/health", health),
        route("/metrics", metrics),
        route("/", page),
    ]
    if service.adapters.num_empty:
        routes.append(route("/v1/load_lora_adapter", model_routes.load_adapter, "POST"))
        routes.append(route("/v1/unload_lora_adapter", model_routes.unload_adapter, "POST"))
    if service.has_tokenizer_info:
        routes.append(route("/tokenizer_info", model_routes.tokenizer_info))
    handlers: dict[Any, Any] = {
        ClientDisconnect: lambda request, error: Response(status_code=499),  # never read
        HTTPException: refuse_path,
        **dict.fromkeys((ApiError, FieldError, MissingFieldError, *REFUSALS, Exception), refuse),
    }

    @contextlib.asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        async with service.engines.running():
            reporting = asyncio.ensure_future(report_work(service.engines))
            try:
                yield
            finally:
                reporting.cancel()

    middleware = []
    if service.allowed_origins:
        any_of_them: dict[str, Any] = dict(allow_methods=["*"], allow_headers=["*"], expose_headers=[REQUEST_ID_HEADER])
        middleware.append(Middleware(CORSMiddleware, allow_origins=service.allowed_origins, **any_of_them))
    return Starlette(routes=routes, exception_handlers=handlers, lifespan=lifespan, middleware=middleware)


async def version(service: Service, request: Request) -> Response:
    return JSONResponse({"version": jaxpaged.__version__})


async def health(service: Service, request: Request) -> Response:
    engines = service.engines
    if engines.is_draining:
        return JSONResponse({"status": "draining"}, 503)
    return JSONResponse({"status": "ok" if engines.failure is None else "degraded"})


async def metrics(service: Service, request: Request) -> Response:
    return Response(service.metrics.text(), media_type=CONTENT_TYPE_PLAIN_0_0_4)


async def page(service: Service, request: Request) -> Response:
    return HTMLResponse(PAGE.read_text(), headers={"Content-Security-Policy": PAGE_POLICY})


def refuse(request: Request, error: Exception) -> Response:
    if isinstance(error, FieldError):
        error = ApiError(400, f"{str(error).rstrip('.')}.", param=error.path)
    elif isinstance(error, MissingFieldError):
        error = ApiError(400, f"The field {error} is missing.", param=error.path)
    elif not isinstance(error, ApiError):
        error = REFUSALS.get(type(error), ApiError(500, "The server failed."))
    return JSONResponse(error.body(), error.status, headers=error.headers)


def refuse_path(request: Request, error: HTTPException) -> Response:
    message = f"{error.detail}."
    if error.status_code == 404 and request.url.path.startswith("/v1/"):
        paths = "/v1/chat/completions, /v1/responses and /v1/completions"
        message += f" There are {paths} here, and no {request.url.path[:60]!r}."
    return JSONResponse(ApiError(error.status_code, message).body(), error.status_code, headers=error.headers)
