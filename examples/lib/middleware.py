"""Middleware: refuses ambiguous body lengths and other hosts, gives each request an id, and logs requests."""

import re
import time
import uuid

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from lib.api_error import ApiError
from lib.command_line import say

REQUEST_ID = "jaxpaged.request_id"  # key in the request's scope
DETAILS = "jaxpaged.details"  # key in the scope, for a function that returns details for the log
REQUEST_ID_HEADER = "x-request-id"
MOST_ID_CHARACTERS = 128
TWO_LENGTHS = JSONResponse(
    ApiError(400, "A request has Content-Length or Transfer-Encoding, not both.").body(), 400, {"Connection": "close"}
)
LOCAL_HOST = re.compile(r"(localhost|127\.0\.0\.1|\[::1\])(:\d+)?", re.IGNORECASE)
OTHER_HOST = JSONResponse(
    ApiError(
        403,
        "Without an API key this server answers only requests to localhost, 127.0.0.1 or [::1]; set a key if a proxy "
        "passes another Host.",
    ).body(),
    403,
)


def with_request_ids(app: ASGIApp, *, logs_requests: bool, checks_host: bool) -> ASGIApp:
    """Wraps the application. Each response carries the client's x-request-id, or a new one. `logs_requests` logs POST
    requests."""

    async def identified(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        request_id = headers.get(REQUEST_ID_HEADER, "")
        if not (request_id.isascii() and request_id.isprintable() and 0 < len(request_id) <= MOST_ID_CHARACTERS):
            request_id = uuid.uuid4().hex
        scope[REQUEST_ID] = request_id
        status, begin = 0, time.monotonic()

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                MutableHeaders(scope=message)[REQUEST_ID_HEADER] = request_id
            await send(message)

        answer = app
        if {"content-length", "transfer-encoding"} <= set(headers):
            answer = TWO_LENGTHS  # a proxy may have used the other length (request smuggling)
        elif checks_host and LOCAL_HOST.fullmatch(headers.get("host", "")) is None:
            answer = OTHER_HOST  # a web page's name may resolve to 127.0.0.1 (DNS rebinding)
        try:
            await answer(scope, receive, send_with_id)
        finally:
            if logs_requests and scope["method"] == "POST":
                details = scope[DETAILS]() if DETAILS in scope else ""
                seconds = time.monotonic() - begin
                say(f"{request_id}: POST {scope['path']!r} {status or 'left'} in {seconds:.2f} s{details}")

    return identified
