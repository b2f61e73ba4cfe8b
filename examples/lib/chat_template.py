"""Renders the chat template of a checkpoint in a separate process, since the template is an untrusted program.

transformers renders it in Jinja's sandbox, which protects the machine. Process limits bound the CPU time and memory of
each request, because nothing inside a Python process can stop `{{ 9**9**9 }}`. This file is also the program of that
process. It reads JSON objects from stdin, one per line, first the template and then requests, and answers each request
with one line.
"""

import contextlib
import importlib.util
import json
import os
import queue
import re
import resource
import select
import signal
import subprocess
import sys
import time
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any

NUM_PROCESSES = 2  # so that a slow conversation does not block all others
MOST_SECONDS = 10  # CPU time per request
MOST_SECONDS_OF_WAITING = 60  # for a free process, and for its answer
MOST_BYTES = 2**29
MOST_CHARACTERS = 2**20  # that a template may add to a request
MARK_START, MARK_END = "\U000f0000", "\U000f0001"  # around a control token that is spelled in a conversation

Conversation = list[dict[str, Any]]  # messages with any fields


class ChatTemplateError(Exception):
    """The conversation cannot be rendered: the template refuses it, or fails. The message is one sentence."""


class RendererBusyError(Exception):
    """The conversation was not rendered because this machine is overloaded. The message is one sentence."""


class ChatTemplate:
    """Renders conversations. May be used from several threads at once.

    The processes start on demand, and end with this object or with the program, however it ends.

    Args:
        template: the template, or named templates: "tool_use" for conversations with tools, "default" for others.
        special_tokens: variables of the template.
        added_tokens: tokens that are matched before any merges, and whether each is special.
    """

    def __init__(self, template: str | dict[str, str], special_tokens: dict[str, Any], added_tokens: dict[str, bool]):
        if importlib.util.find_spec("transformers") is None:
            raise ModuleNotFoundError("No module named 'transformers'", name="transformers")
        setup = {"template": template, "special_tokens": special_tokens, "added_tokens": added_tokens}
        self._setup = json.dumps(setup)
        # Last in, first out, so that the second process starts only when it is needed.
        self._free: queue.LifoQueue[subprocess.Popen[str] | None] = queue.LifoQueue()
        for _ in range(NUM_PROCESSES):
            self._free.put(None)
        weakref.finalize(self, _end_all, self._free)

    def render(
        self,
        conversations: Sequence[Conversation],
        *,
        tools: list[dict[str, Any]] | None = None,
        documents: list[dict[str, Any]] | None = None,
        continue_final_message: bool = False,
        chat_template_kwargs: dict[str, Any] | None = None,
        allow_control_tokens: bool = False,
    ) -> list[str]:
        """The text of each conversation, up to the beginning of the answer.

        With `continue_final_message` the answer continues the last message. `chat_template_kwargs` are extra variables
        for the template. Unless control tokens are allowed, one that the conversation spells is put between
        `MARK_START` and `MARK_END`. If the template separates it from a mark, the mark remains alone.

        Raises:
            ChatTemplateError: the template refuses the conversation, or fails.
            RendererBusyError: this machine is too busy.
        """
        request = dict(
            conversations=conversations,
            tools=tools,
            documents=documents,
            continue_final_message=continue_final_message,
            chat_template_kwargs=chat_template_kwargs or {},
            allow_control_tokens=allow_control_tokens,
            most_seconds=MOST_SECONDS,
        )
        try:
            process = self._free.get(timeout=MOST_SECONDS_OF_WAITING)
        except queue.Empty as error:
            raise RendererBusyError("Other chats keep all renderers busy; try again later.") from error
        try:
            if process is None or process.poll() is not None:
                _end(process)
                process = _start(self._setup)
            answer = _ask(process, json.dumps(request))
        except BaseException:
            # A late answer would be read as the answer to the next request.
            _end(process)
            self._free.put(None)
            raise
        self._free.put(process)
        if "error" in answer:
            raise ChatTemplateError(f"The chat template failed: {answer['error'].rstrip('.')}.")
        return answer["texts"]


def _start(setup: str) -> subprocess.Popen[str]:
    # In its own process group, because Ctrl-C must not end it while a server drains.
    process = subprocess.Popen(
        [sys.executable, "-P", __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, process_group=0
    )
    _send(process, setup)
    return process


def _ask(process: subprocess.Popen[str], request: str) -> dict[str, Any]:
    _send(process, request)
    assert process.stdout is not None
    answered = select.poll()
    answered.register(process.stdout, select.POLLIN)
    if not answered.poll(1000 * MOST_SECONDS_OF_WAITING):
        raise RendererBusyError(f"The chat was not rendered in {MOST_SECONDS_OF_WAITING} seconds; try again later.")
    line = process.stdout.readline()
    if line:
        return json.loads(line)
    if process.wait() == -signal.SIGXCPU:
        raise ChatTemplateError(f"The chat template needs more than {MOST_SECONDS} seconds of processor time.")
    raise RendererBusyError(f"The renderer of chats ended with {process.returncode}; try again.")


def _send(process: subprocess.Popen[str], line: str) -> None:
    assert process.stdin is not None
    with contextlib.suppress(BrokenPipeError):  # the process has ended; the next read reports it
        print(line, file=process.stdin, flush=True)


def _end(process: subprocess.Popen[str] | None) -> None:
    if process is not None:
        process.kill()
        process.communicate()


def _end_all(free: "queue.LifoQueue[subprocess.Popen[str] | None]") -> None:
    while not free.empty():
        _end(free.get())


def main() -> None:
    """The program of the process."""
    setup = json.loads(sys.stdin.readline())
    os.environ["TRANSFORMERS_VERBOSITY"] = "error"  # otherwise it recommends PyTorch on stderr
    import transformers.utils.chat_template_utils  # noqa: F401 (its memory does not count)

    with contextlib.suppress(OSError, ValueError):  # macOS has no such limit
        size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (size + MOST_BYTES, size + MOST_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    for line in sys.stdin:
        try:
            answer: dict[str, Any] = {"texts": _render(setup, json.loads(line), len(line))}
        except Exception as error:  # a template can raise anything
            answer = {"error": " ".join(str(error).split())[:200] or type(error).__name__}
        print(json.dumps(answer), flush=True)


def _render(setup: dict[str, Any], request: dict[str, Any], size: int) -> list[str]:
    from transformers.utils.chat_template_utils import render_jinja_template

    _, hard_limit = resource.getrlimit(resource.RLIMIT_CPU)
    resource.setrlimit(resource.RLIMIT_CPU, (int(time.process_time()) + 1 + request["most_seconds"], hard_limit))
    template = setup["template"]
    if isinstance(template, dict):
        name = "tool_use" if request["tools"] and "tool_use" in template else "default"
        if name not in template:
            raise ValueError(f"there is no default among {', '.join(template)}")
        template = template[name]
    inputs = {name: request[name] for name in ("conversations", "tools", "documents", "chat_template_kwargs")}
    if not request["allow_control_tokens"]:
        inputs = _marked(inputs, _control_tokens(setup["added_tokens"], template))
    inputs["conversations"] = [
        # As in transformers: OpenAI's API has null fields, which templates expect to be absent.
        [{name: value for name, value in message.items() if value is not None} for message in messages]
        for messages in inputs["conversations"]
    ]
    continues = request["continue_final_message"]
    rendered: Any = render_jinja_template(
        **setup["special_tokens"] | inputs.pop("chat_template_kwargs"),
        **inputs,
        chat_template=template,
        continue_final_message=continues,
        add_generation_prompt=not continues,
        return_assistant_tokens_mask=False,  # set here, so that a request cannot set it
    )
    return [_checked(text, size) for text in rendered[0]]


def _checked(text: str, request_size: int) -> str:
    if len(text) > request_size + MOST_CHARACTERS:
        raise ValueError(f"it makes {len(text)} characters of a request of {request_size}")
    text.encode()  # raises for half of a surrogate pair
    for mark in MARK_START, MARK_END:
        text = text.replace(json.dumps(mark)[1:-1], mark)  # as tojson(ensure_ascii=true) writes it
    return text


def _control_tokens(added_tokens: dict[str, bool], template: str) -> re.Pattern[str]:
    """Matches special tokens, and added tokens that the template contains, except white space."""
    control = [t for t, is_special in added_tokens.items() if is_special or (t in template and not t.isspace())]
    return re.compile("|".join(map(re.escape, sorted(control, key=len, reverse=True))) or "(?!)")


def _marked(value: Any, control_tokens: re.Pattern[str]) -> Any:
    """The value with all control tokens marked, even in keys, which templates may write as JSON."""
    if isinstance(value, dict):
        return {_marked(name, control_tokens): _marked(each, control_tokens) for name, each in value.items()}
    if isinstance(value, list):
        return [_marked(each, control_tokens) for each in value]
    if isinstance(value, str):
        return control_tokens.sub(rf"{MARK_START}\g<0>{MARK_END}", re.sub(f"[{MARK_START}{MARK_END}]", "", value))
    return value


if __name__ == "__main__":
    main()
