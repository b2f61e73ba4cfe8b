"""What the routes of the server share: the engine's thread, the model, and what the server was started with."""

import dataclasses
import functools
import secrets
from collections.abc import Callable

from starlette.requests import Request

from lib.api_error import ApiError
from lib.checkpoint import Checkpoint
from lib.engine_thread import EngineThread

RETRY_SECONDS = 1


@dataclasses.dataclass
class Service:
    """One model, its engine and its limits.

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

    def check_key(self, request: Request) -> None:
        """Raises `ApiError` if the request lacks the key."""
        if self.api_key is None:
            return
        scheme, _, key = request.headers.get("authorization", "").encode("latin-1").partition(b" ")
        if scheme.lower() != b"bearer" or not secrets.compare_digest(key.strip(), self.api_key.encode()):
            raise ApiError(401, "The API key is missing or wrong.", code="invalid_api_key")

    async def read_body(self, request: Request) -> bytes:
        """The JSON of a request that has the key. Raises `ApiError`."""
        self.check_key(request)
        # Also keeps out other web pages, whose scripts may not send this type across origins.
        if request.headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
            raise ApiError(415, "The Content-Type must be application/json.")
        body = bytearray()
        async for part in request.stream():
            body += part
            if len(body) > self.max_body_bytes:
                raise ApiError(413, f"The body must be at most {self.max_body_bytes} bytes.")
        return bytes(body)

    @functools.cached_property
    def text_of(self) -> Callable[[int], str]:
        """The text of a token by itself."""
        return functools.cache(lambda token: self.checkpoint.tokenizer.decode([token]))
