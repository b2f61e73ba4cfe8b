"""uvicorn, extended: it drains on SIGTERM, and answers half-closed clients."""

import asyncio
import contextlib
import socket
from collections.abc import Callable
from types import FrameType
from typing import Any

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from lib.app import create_app
from lib.command_line import RequestError, say
from lib.completions import COMMENT
from lib.middleware import with_request_ids
from lib.service import Service

FLUSH_SECONDS = 5  # for clients to read the last of their answers
PROBE_SECONDS = 1


class Server(uvicorn.Server):
    """Drains on SIGTERM and Ctrl-C: running requests finish, and new ones get status 503.

    The process then exits with 0. A second signal ends it at once. `on_start` is called when the server accepts
    requests and handles signals.
    """

    def __init__(self, service: Service, *, drain_seconds: float, on_start: Callable[[], None] = lambda: None):
        app = with_request_ids(
            create_app(service), logs_requests=service.logs_requests, checks_host=service.checks_host
        )
        config = uvicorn.Config(
            app,
            loop="asyncio",
            http=Protocol,
            log_level="warning",
            access_log=False,
            timeout_graceful_shutdown=FLUSH_SECONDS + 2,  # never reached
        )
        super().__init__(config)
        self.engines, self.drain_seconds, self.on_start = service.engines, drain_seconds, on_start
        self.engines.on_failure = self._exit
        self.loop: asyncio.AbstractEventLoop | None = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.loop = asyncio.get_running_loop()
        self.on_start()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self.loop is None or self.engines.is_draining:
            self.should_exit = self.force_exit = True
        else:
            self.loop.call_soon_threadsafe(self._begin_to_drain)

    def _begin_to_drain(self) -> None:
        self._draining = asyncio.ensure_future(self.engines.drain(self.drain_seconds))
        self._draining.add_done_callback(lambda _: self._exit())
        say(f"Draining for at most {self.drain_seconds:g} seconds.")  # last: stderr may be closed

    def _exit(self) -> None:
        self.should_exit = True

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        dropping = asyncio.ensure_future(self._drop_connections())
        await super().shutdown(sockets)
        await dropping
        if self.force_exit:  # uvicorn leaves it out then, and logs a traceback
            await self.lifespan.shutdown()

    async def _drop_connections(self) -> None:
        """Disconnects clients that do not read their answer or never finish their request.

        Their tasks then end as after any disconnect. If uvicorn cancelled them, each would log a traceback.
        """
        await wait_until(lambda: self.force_exit or not self.server_state.connections, FLUSH_SECONDS)
        for connection in list(self.server_state.connections):
            connection.transport.abort()
        await wait_until(lambda: not self.server_state.tasks, 1)


async def wait_until(condition: Callable[[], bool], seconds: float) -> None:
    """Waits until the condition holds, for at most these seconds."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            while not condition():
                await asyncio.sleep(0.02)


class Protocol(H11Protocol):
    """Answers a client that has closed only its sending side, as `nc -N` does.

    A disconnected client looks the same until something is sent to it. So the server keeps sending bytes that clients
    ignore: `100 Continue` before an answer, comments in an event stream. To a closed connection this fails.
    """

    def eof_received(self) -> bool | None:  # type: ignore[override] # asyncio asks whether to keep it open
        has_asked = self.conn.their_state in (h11.DONE, h11.MUST_CLOSE)
        is_waiting = has_asked and self.conn.our_state in (h11.SEND_RESPONSE, h11.SEND_BODY)
        if not is_waiting or self.scope["http_version"] == "1.0":  # which knows no 100 Continue
            return None  # closes the connection
        self.cycle.keep_alive = False
        self._probe()
        return True

    def _probe(self) -> None:
        skipped: h11.Event
        scope: Any = self.scope
        if self.conn.our_state is h11.SEND_RESPONSE:
            skipped = h11.InformationalResponse(status_code=100, headers=[], reason=b"Continue")
        elif self.conn.our_state is h11.SEND_BODY and COMMENT in scope:
            skipped = h11.Data(scope[COMMENT])
        else:
            return
        if not self.transport.is_closing():
            self.transport.write(self.conn.send(skipped))
            self.loop.call_later(PROBE_SECONDS, self._probe)


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
