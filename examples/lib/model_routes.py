"""The routes that describe the model."""

from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from lib.api_error import ApiError
from lib.service import Service


async def list_models(service: Service, request: Request) -> Response:
    service.check_key(request)
    return JSONResponse({"object": "list", "data": models(service)})


async def show_model(service: Service, request: Request) -> Response:
    service.check_key(request)
    named = request.path_params["model"]
    for model in models(service):
        if model["id"] == named:
            return JSONResponse(model)
    raise ApiError(404, f"The model {named[:100]!r} does not exist here.", code="model_not_found")


def models(service: Service) -> list[dict[str, Any]]:
    names = service.model, *service.adapters
    return [{"id": name, "object": "model", "created": 0, "owned_by": "jaxpaged"} for name in names]
