"""Clients of examples/serve.py that stream completions in their own process, with little work per event."""

import asyncio
import dataclasses
import json
import time
from collections.abc import Iterator, Sequence

END = b"0\r\n\r\n"  # end of a chunked body


@dataclasses.dataclass
class Streamed:
    """One answer, as its client read it."""

    text: str
    num_tokens: int
    num_events: int
    seconds_to_first: float


class Client(asyncio.Protocol):
    """One connection, which requests one completion after another."""

    def __init__(self, bodies: Iterator[tuple[int, bytes]], answers: dict[int, tuple[bytes, float]]):
        self._bodies, self._answers = bodies, answers
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self._ask()

    def _ask(self) -> None:
        asked = next(self._bodies, None)
        if asked is None:
            self._transport.close()
            return
        self._index, body = asked
        self._received, self._first, self._began = bytearray(), 0.0, time.perf_counter()
        head = f"POST /v1/completions HTTP/1.1\r\nHost: here\r\nContent-Length: {len(body)}\r\n"
        self._transport.write(f"{head}Content-Type: application/json\r\n\r\n".encode() + body)

    def data_received(self, data: bytes) -> None:
        self._received += data
        if not self._first and b"data: " in data:
            self._first = time.perf_counter() - self._began
        if self._received.endswith(END) or not self._received.startswith(b"HTTP/1.1 200"):
            self._answers[self._index] = bytes(self._received), self._first
            self._ask()

    def connection_lost(self, error: Exception | None) -> None:
        self.done.set_result(None)


def read_answer(received: bytes, first: float) -> Streamed:
    lines = received.split(b"\n")
    if not received.startswith(b"HTTP/1.1 200") or b"data: [DONE]" not in lines:
        raise AssertionError(f"a client got {received[:500]!r}")
    chunks = [json.loads(line.removeprefix(b"data: ")) for line in lines if line.startswith(b"data: {")]
    text = "".join(choice["text"] for chunk in chunks for choice in chunk["choices"])
    return Streamed(text, chunks[-1]["usage"]["completion_tokens"], len(chunks), first)


def stream(port: int, work: Sequence[tuple[list[int], int]], num_clients: int) -> tuple[float, list[Streamed]]:
    """The seconds for all requests, and the answer to each. A client sends its next request after each answer."""
    common = dict(temperature=0, stream=True, stream_options={"include_usage": True})
    bodies = [json.dumps(dict(prompt=prompt, max_tokens=new) | common).encode() for prompt, new in work]
    answers: dict[int, tuple[bytes, float]] = {}

    async def run() -> float:
        loop, left = asyncio.get_running_loop(), iter(enumerate(bodies))
        begin = time.perf_counter()
        opening = [loop.create_connection(lambda: Client(left, answers), "127.0.0.1", port) for _ in range(num_clients)]
        for _, client in await asyncio.gather(*opening):
            await client.done
        return time.perf_counter() - begin

    seconds = asyncio.run(run())
    if len(answers) < len(bodies):
        raise AssertionError(f"{len(bodies) - len(answers)} of {len(bodies)} requests were not answered")
    return seconds, [read_answer(*answers[i]) for i in range(len(bodies))]
