"""Formats answers and events of OpenAI's Responses API.

https://platform.openai.com/docs/api-reference/responses-streaming
"""

import dataclasses
import json
import secrets
import time
from collections.abc import AsyncIterator, Iterator
from typing import Any

from lib.engine_runner import EngineFailedError
from lib.pieces import Piece, Pieces
from lib.response_store import ResponseStore
from lib.responses_forms import ResponsesAsk
from lib.tool_calls import ToolCall

Event = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class TextKind:
    """An item of the output whose text arrives in pieces, and its events."""

    item: dict[str, Any]
    id_prefix: str
    part: dict[str, Any]
    event: str
    in_delta: dict[str, Any]  # further fields of the events


REASONING = TextKind(
    {"type": "reasoning", "summary": [], "content": []},
    "rs",
    {"type": "reasoning_text", "text": ""},
    "response.reasoning_text",
    {},
)
MESSAGE = TextKind(
    {"type": "message", "role": "assistant", "content": []},
    "msg",
    {"type": "output_text", "text": "", "annotations": [], "logprobs": []},
    "response.output_text",
    {"logprobs": []},
)


class ResponseAnswer:
    """Creates the answer to one request: complete, or as events. Both come from the same events.

    Args:
        pieces: pieces of the completion.
        asked: the request.
        store: where the response is kept, if the request wants that.
    """

    def __init__(self, pieces: Pieces, asked: ResponsesAsk, store: ResponseStore):
        self._pieces, self._asked, self._store = pieces, asked, store
        self._response: dict[str, Any] = {
            "id": new_id("resp"),
            "object": "response",
            "created_at": int(time.time()),
            "status": "in_progress",
            "background": False,
            "error": None,
            "incomplete_details": None,
            "output": [],
            "usage": None,
        } | asked.shown
        self._open: TextKind | None = None  # the kind of the last item, while its text grows
        self._num_events = 0

    async def whole(self) -> dict[str, Any]:
        async for event in self._events():
            last = event
        return last["response"]

    async def events(self) -> AsyncIterator[str]:
        """Server-sent events."""
        try:
            async for event in self._events():
                yield self._format(event)
        except EngineFailedError as error:
            self._response |= {"status": "failed", "error": {"code": "server_error", "message": str(error)}}
            yield self._format({"type": "response.failed", "response": self._response})

    def _format(self, event: Event) -> str:
        event = event | {"sequence_number": self._num_events}
        self._num_events += 1
        return f"event: {event['type']}\ndata: {json.dumps(event, allow_nan=False)}\n\n"

    async def _events(self) -> AsyncIterator[Event]:
        yield {"type": "response.created", "response": dict(self._response)}
        yield {"type": "response.in_progress", "response": dict(self._response)}
        reason = None
        async for piece in self._pieces:
            for event in self._piece_events(piece):
                yield event
            reason = piece.finish_reason
        for event in self._close("incomplete" if reason == "length" else "completed"):
            yield event
        yield self._end(reason)

    def _piece_events(self, piece: Piece) -> Iterator[Event]:
        for kind, text in (REASONING, piece.reasoning), (MESSAGE, piece.text):
            if text:
                yield from self._add_text(kind, text)
        for call in piece.calls:
            yield from self._add_call(call)

    def _add_text(self, kind: TextKind, text: str) -> Iterator[Event]:
        if self._open is not kind:
            yield from self._close("completed")
            self._open = kind
            item = kind.item | {"id": new_id(kind.id_prefix), "status": "in_progress"}
            yield self._add_item(item)
            item["content"] = [dict(kind.part)]
            yield self._part_event("response.content_part.added", part=dict(kind.part))
        self._last["content"][0]["text"] += text
        yield self._part_event(f"{kind.event}.delta", delta=text, **kind.in_delta)

    def _close(self, status: str) -> Iterator[Event]:
        """Ends the item whose text was growing."""
        if self._open is None:
            return
        kind, part, self._open = self._open, self._last["content"][0], None
        self._last["status"] = status
        yield self._part_event(f"{kind.event}.done", text=part["text"], **kind.in_delta)
        yield self._part_event("response.content_part.done", part=part)
        yield self._item_event("response.output_item.done", item=self._last)

    def _add_call(self, call: ToolCall) -> Iterator[Event]:
        yield from self._close("completed")
        item = {"type": "function_call", "id": new_id("fc"), "call_id": call.id, "name": call.name}
        yield self._add_item(item | {"arguments": "", "status": "in_progress"})
        self._last.update(arguments=call.arguments, status="completed")
        about = dict(item_id=item["id"])
        yield self._item_event("response.function_call_arguments.delta", delta=call.arguments, **about)
        done = dict(name=call.name, arguments=call.arguments)
        yield self._item_event("response.function_call_arguments.done", **done, **about)
        yield self._item_event("response.output_item.done", item=self._last)

    def _add_item(self, item: dict[str, Any]) -> Event:
        self._response["output"].append(item)
        return self._item_event("response.output_item.added", item=dict(item))

    @property
    def _last(self) -> dict[str, Any]:
        return self._response["output"][-1]

    def _item_event(self, kind: str, **fields: Any) -> Event:
        return {"type": kind, "output_index": len(self._response["output"]) - 1} | fields

    def _part_event(self, kind: str, **fields: Any) -> Event:
        return self._item_event(kind, item_id=self._last["id"], content_index=0, **fields)

    def _end(self, reason: str | None) -> Event:
        status = {"length": "incomplete", "abort": "failed"}.get(reason or "", "completed")
        self._response |= {"status": status, "usage": self._usage()}
        if status == "incomplete":
            self._response["incomplete_details"] = {"reason": "max_output_tokens"}
        if status == "failed":
            self._response["error"] = {"code": "server_error", "message": "The server is shutting down."}
        elif self._asked.stores:
            self._store.add(self._response, self._asked.earlier, self._asked.items)
        return {"type": f"response.{status}", "response": self._response}

    def _usage(self) -> dict[str, Any]:
        usage = self._pieces.usage
        return {
            "input_tokens": usage["prompt_tokens"],
            "input_tokens_details": {"cached_tokens": usage["prompt_tokens_details"]["cached_tokens"]},
            "output_tokens": usage["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": self._pieces.num_reasoning_tokens},
            "total_tokens": usage["total_tokens"],
        }


def new_id(prefix: str) -> str:
    return f"{prefix}_{secrets.token_hex(16)}"
