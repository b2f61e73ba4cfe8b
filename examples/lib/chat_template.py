"""Renders the chat template of a checkpoint, a program that comes with the weights, in its own process.

Jinja's sandbox protects the machine. Limits of the process bound time and memory: nothing inside a Python process can
stop `{{ 9**9**9 }}`.
"""

import contextlib
import datetime
import json
import resource
import subprocess
import sys
from typing import Any

MOST_SECONDS = 10
MOST_BYTES = 2**29
MOST_CHARACTERS = 2**20  # that a template adds to a text


Conversation = list[dict[str, Any]]  # messages, with any fields that the template knows


class ChatTemplateError(Exception):
    """The conversation cannot be rendered: the template refuses it, or fails. The message is one sentence."""


class RendererBusyError(Exception):
    """The conversation was not rendered because this machine is overloaded. The message is one sentence."""


def render(template: str, conversations: list[Conversation], special_tokens: dict[str, str]) -> list[str]:
    """The text of each conversation, up to where the answer begins."""
    request = json.dumps({"template": template, "conversations": conversations, "special_tokens": special_tokens})
    try:
        done = subprocess.run(
            [sys.executable, __file__], input=request, capture_output=True, text=True, timeout=MOST_SECONDS, check=False
        )
    except subprocess.TimeoutExpired as error:
        raise ChatTemplateError(f"The chat template takes more than {MOST_SECONDS} seconds.") from error
    if done.returncode:
        lines = done.stderr.splitlines() or [f"its process ended with {done.returncode}"]
        raise ChatTemplateError(f"The chat template failed: {lines[-1].rstrip('.')}.")
    return json.loads(done.stdout)


def main() -> None:
    """The process: a request on stdin, the texts on stdout; one line on stderr if it fails."""
    resource.setrlimit(resource.RLIMIT_CPU, (MOST_SECONDS, MOST_SECONDS))
    with contextlib.suppress(ValueError):  # macOS has no such limit
        resource.setrlimit(resource.RLIMIT_AS, (MOST_BYTES, MOST_BYTES))
    request = json.load(sys.stdin)
    try:
        template, special_tokens = request["template"], request["special_tokens"]
        rendered = [_render(template, messages, special_tokens) for messages in request["conversations"]]
    except Exception as error:  # a template can raise anything
        message = " ".join(str(error).split())[:200] or type(error).__name__
        sys.exit(message)
    json.dump(rendered, sys.stdout)


def _render(template: str, messages: Conversation, special_tokens: dict[str, Any]) -> str:
    import jinja2.sandbox

    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.globals |= {"raise_exception": _refuse, "strftime_now": datetime.datetime.now().strftime}
    rendered = environment.from_string(template).render(messages=messages, add_generation_prompt=True, **special_tokens)
    num_characters = sum(len(message["content"]) for message in messages)
    if len(rendered) > num_characters + MOST_CHARACTERS:
        raise ValueError(f"it makes {len(rendered)} characters of a prompt of {num_characters}")
    rendered.encode()  # raises if it holds half of a surrogate pair
    return rendered


def _refuse(message: str) -> None:
    import jinja2

    raise jinja2.TemplateError(message)


if __name__ == "__main__":
    main()
