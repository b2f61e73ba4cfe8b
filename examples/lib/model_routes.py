"""Routes about the model: names, tokenizer and adapters."""

import asyncio
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response

from lib.api_error import ApiError
from lib.checkpoint import CheckpointError
from lib.completions import encode_conversation
from lib.openai_fields import refuse_unread
from lib.openai_forms import check_ids, read_model
from lib.openai_messages import check_unicode, read_conversation
from lib.openai_tools import read_tools
from lib.replicas import load_adapter_into
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
    """OpenAI's route in vLLM's format, which adds the last three fields."""
    first = service.served_names[0]
    return [
        {
            "id": name,
            "object": "model",
            "created": service.created,
            "owned_by": "jaxpaged",
            "root": first if slot is None else name,
            "parent": None if slot is None else first,
            "max_model_len": service.max_model_len,
        }
        for name, slot in service.names.items()
    ]


async def tokenize(service: Service, request: Request) -> Response:
    """vLLM's route: the tokens of a prompt or of messages."""
    fields = await service.read_fields(request)
    read_model(fields, service)
    wants_texts = fields.flag("return_token_strs", False)
    encode: Callable[[], list[int]]
    if fields.get("messages", None) is None:
        prompt = fields.text("prompt")
        check_unicode(fields, "prompt", prompt)
        add_special_tokens = fields.flag("add_special_tokens", True)
        encode = functools.partial(service.checkpoint.tokenizer.encode, prompt, add_special_tokens=add_special_tokens)
        refuse_unread(fields, {})
    else:
        conversation = read_conversation(fields) | {"tools": read_tools(fields).tools or None}
        encode = functools.partial(encode_conversation, service, conversation)
        refuse_unread(fields, {"add_special_tokens": (False,)})
    tokens = await asyncio.to_thread(encode)
    answer: dict[str, Any] = {"count": len(tokens), "max_model_len": service.max_model_len, "tokens": tokens}
    answer["token_strs"] = [service.token_text(token) for token in tokens] if wants_texts else None
    return JSONResponse(answer)


async def detokenize(service: Service, request: Request) -> Response:
    """vLLM's route: the text of tokens."""
    fields = await service.read_fields(request)
    read_model(fields, service)
    tokens = fields.get("tokens")
    if tokens != []:
        check_ids(fields, "tokens", tokens, service.checkpoint.config.vocab_size, "a list of token ids")
    refuse_unread(fields, {})
    decode = service.checkpoint.tokenizer.decode
    return JSONResponse({"prompt": await asyncio.to_thread(decode, tokens, skip_special_tokens=False)})


async def load_adapter(service: Service, request: Request) -> Response:
    """vLLM's route: loads an adapter in PEFT's format from a folder on the server."""
    fields, adapters = await service.read_fields(request), service.adapters
    name, folder = fields.text("lora_name"), Path(fields.text("lora_path"))
    replaces = fields.flag("load_inplace", False)
    refuse_unread(fields, {"is_3d_lora_weight": (False,)})
    async with adapters.lock:
        if name in service.served_names or (name in adapters.slots and not replaces):
            raise fields.error("lora_name", f"must be new, or an adapter's with load_inplace: true; got {name!r}")
        slot = adapters.slots[name] if name in adapters.slots else adapters.find_free()
        try:
            await service.engines.call(functools.partial(load_adapter_into, slot, folder))
        except CheckpointError as error:
            raise ApiError(400, str(error), param="lora_path") from error
        adapters.slots[name] = slot
    return PlainTextResponse(f"Success: LoRA adapter '{name}' added successfully.")


async def unload_adapter(service: Service, request: Request) -> Response:
    """vLLM's route: unloads an adapter. Running requests keep it."""
    fields = await service.read_fields(request)
    name = fields.text("lora_name")
    fields.get("lora_int_id", None)
    refuse_unread(fields, {})
    if service.adapters.slots.pop(name, None) is None:
        raise ApiError(404, f"There is no adapter {name[:100]!r} here.", param="lora_name", code="model_not_found")
    return PlainTextResponse(f"Success: LoRA adapter '{name}' removed successfully.")


async def tokenizer_info(service: Service, request: Request) -> Response:
    """vLLM's route: the fields of tokenizer_config.json that lm-eval needs."""
    service.check_key(request)
    tokenizer = service.checkpoint.tokenizer
    names = {name: tokenizer.special_tokens.get(name) or None for name in ("bos_token", "eos_token")}
    template = tokenizer.chat_template
    template = template.get("default") if isinstance(template, dict) else template
    info = {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": template}
    return JSONResponse(names | info)
