"""The routes of OpenAI's Responses API."""

import time

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from lib.api_error import ApiError
from lib.completions import generate
from lib.response_store import Stored
from lib.responses_answers import ResponseAnswer
from lib.responses_forms import ResponsesAsk
from lib.service import Service


async def respond(service: Service, request: Request) -> Response:
    begin = time.perf_counter()
    asked = ResponsesAsk(await service.read_fields(request), service)
    return await generate(
        service, request, asked.ask, begin, lambda pieces: ResponseAnswer(pieces, asked, service.responses)
    )


async def show_response(service: Service, request: Request) -> Response:
    service.check_key(request)
    return JSONResponse(find(service, request).response)


async def delete_response(service: Service, request: Request) -> Response:
    service.check_key(request)
    response_id = find(service, request).response["id"]
    service.responses.remove(response_id)
    return JSONResponse({"id": response_id, "object": "response.deleted", "deleted": True})


def find(service: Service, request: Request) -> Stored:
    """Raises `ApiError`."""
    stored = service.responses.get(request.path_params["response"])
    if stored is None:
        raise ApiError(404, "The server has no such response, or no longer.", code="response_not_found")
    return stored
