"""State that the server's routes share: the engines, the model and the options."""

import dataclasses
import functools
import json
import secrets
import time

from starlette.requests import Request

from jaxpaged.grammar import Vocabulary
from lib.adapter_slots import AdapterSlots
from lib.api_error import ApiError
from lib.checkpoint import Checkpoint
from lib.engine_metrics import Metrics
from lib.engines import Engines
from lib.fields import Fields
from lib.response_store import ResponseStore
from lib.tool_formats import ToolFormat

RETRY_SECONDS = 1


@dataclasses.dataclass
class Service:
    """One model, its engines and their limits.

    Attributes:
        served_names: the model's names; answers have the first.
        max_model_len: maximum tokens of a request, prompt and answer together.
        adapters: adapter slots of the model.
        max_logprobs: maximum number of likely tokens per token, as in the engine.
        sampling_defaults: temperature, top_p and top_k of requests that do not set them.
        splits_reasoning: whether chat answers have the reasoning in a separate field.
        tool_format: how the model writes tool calls; None: unknown, so no tools can be called.
        vocabulary: the engines' vocabulary; None: requests may have no grammar.
        responses: the latest responses of /v1/responses.
        has_tokenizer_info: whether the route /tokenizer_info is enabled.
        allowed_origins: origins of web pages that may send requests; "*": all.
        logs_requests: whether each request is logged.
        checks_host: whether requests are refused unless their Host header names this machine.
    """

    engines: Engines
    checkpoint: Checkpoint
    served_names: tuple[str, ...]
    max_model_len: int
    adapters: AdapterSlots = dataclasses.field(default_factory=AdapterSlots)
    api_key: str | None = None
    max_logprobs: int = 0
    max_body_bytes: int = 2**20
    allow_control_tokens: bool = False
    sampling_defaults: dict[str, float] = dataclasses.field(default_factory=dict)
    splits_reasoning: bool = True
    tool_format: ToolFormat | None = None
    vocabulary: Vocabulary | None = None
    responses: ResponseStore = dataclasses.field(default_factory=ResponseStore)
    has_tokenizer_info: bool = False
    allowed_origins: tuple[str, ...] = ()
    logs_requests: bool = False
    checks_host: bool = False

    def __post_init__(self) -> None:
        self.created = int(time.time())
        self.metrics = Metrics(self.engines, self.served_names[0])
        # Logprobs repeat the same tokens often.
        self.token_text = functools.cache(self.checkpoint.tokenizer.token_text)
        self.token_bytes = functools.cache(self.checkpoint.tokenizer.token_bytes)

    @property
    def names(self) -> dict[str, int | None]:
        """Names that requests may use, and the adapter slot of each; None for the model itself."""
        return dict.fromkeys(self.served_names) | self.adapters.slots

    def check_key(self, request: Request) -> None:
        """Raises `ApiError` unless the request has the API key."""
        if self.api_key is None:
            return
        scheme, _, key = request.headers.get("authorization", "").encode("latin-1").partition(b" ")
        if scheme.lower() != b"bearer" or not secrets.compare_digest(key.strip(), self.api_key.encode()):
            raise ApiError(401, "The API key is missing or wrong.", code="invalid_api_key")

    async def read_fields(self, request: Request) -> Fields:
        """Checks the API key and returns the JSON object of the body. Raises `ApiError`."""
        self.check_key(request)
        # This also blocks other web pages, whose scripts may not send this type across origins.
        if request.headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
            raise ApiError(415, "The Content-Type must be application/json.")
        body = bytearray()
        async for part in request.stream():
            body += part
            if len(body) > self.max_body_bytes:
                raise ApiError(413, f"The body must be at most {self.max_body_bytes} bytes.")
        try:
            return Fields(json.loads(body))
        except (ValueError, RecursionError) as error:  # also for invalid UTF-8, and numbers with too many digits
            raise ApiError(400, "The body must be a JSON object.") from error
