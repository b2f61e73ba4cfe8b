"""Parses the tools of an OpenAI request and which of them the model may call."""

import dataclasses
import re
from typing import Any

from lib.fields import Fields

MOST_TOOLS = 128
TOOL_NAME = re.compile(r"[a-zA-Z0-9_-]{1,64}")
CHOICE = 'must be "none", "auto", "required" or {"type": "function", "function": {"name": a tool}}'


@dataclasses.dataclass(frozen=True)
class ToolUse:
    """The tools of a request.

    Attributes:
        tools: the tools, for the chat template.
        choice: "none", "auto", "required", or the name of the one tool to call.
        is_parallel: whether an answer may have several calls.
        strict_names: tools whose arguments must match their schema.
    """

    tools: list[dict[str, Any]]
    choice: str
    is_parallel: bool
    strict_names: tuple[str, ...]

    @property
    def is_forced(self) -> bool:
        """Whether an answer must be a call."""
        return self.choice not in ("none", "auto")

    @property
    def callable_names(self) -> tuple[str, ...]:
        """Names of the tools that the model may call. Empty: its text is not searched for calls."""
        names = tuple(tool["function"]["name"] for tool in self.tools)
        return {"none": (), "auto": names, "required": names}.get(self.choice, (self.choice,))


def read_tools(fields: Fields) -> ToolUse:
    """Raises `FieldError` and `MissingFieldError`."""
    clause = f"must be a list of at most {MOST_TOOLS} objects"
    tools = fields.items("tools", lambda tool: isinstance(tool, dict), clause, MOST_TOOLS)
    functions = [_read_tool(Fields(tool, f"tools[{i}].")) for i, tool in enumerate(tools)]
    names = [function.text("name") for function in functions]
    if len(set(names)) < len(names):
        raise fields.error("tools", "must have different names")
    return ToolUse(
        tools=tools,
        choice=_read_choice(fields, names),
        is_parallel=fields.flag("parallel_tool_calls", True),
        strict_names=tuple(function.text("name") for function in functions if function.flag("strict", False)),
    )


def _read_tool(tool: Fields) -> Fields:
    kind = tool.text("type")
    if kind != "function":
        raise tool.error("type", f"must be function; got {kind[:60]!r}")
    function = Fields(tool.get("function"), f"{tool.within}function.")
    name = function.text("name")
    if TOOL_NAME.fullmatch(name) is None:
        raise function.error("name", f"must be 1 to 64 letters, digits, underscores and dashes; got {name[:80]!r}")
    function.text("description", "")
    if not isinstance(function.get("parameters", {}), dict):
        raise function.error("parameters", "must be a JSON schema of an object")
    return function


def _read_choice(fields: Fields, names: list[str]) -> str:
    choice = fields.get("tool_choice", "auto" if names else "none")
    if isinstance(choice, dict) and choice.get("type") == "function":
        chosen = Fields(Fields(choice, "tool_choice.").get("function"), "tool_choice.function.")
        name = chosen.text("name")
        if name not in names:
            raise chosen.error("name", f"must be one of the tools; got {name[:80]!r}")
        return name
    if choice not in ("none", "auto", "required"):
        raise fields.error("tool_choice", CHOICE)
    if choice == "required" and not names:
        raise fields.error("tool_choice", "goes with tools")
    return choice
