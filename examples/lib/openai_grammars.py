"""The fields of a request that restrict its answer to a grammar. The engine applies no grammar, so they are refused."""

from lib.fields import Fields
from lib.openai_tools import ToolUse

REASON = "this server cannot restrict an answer to a grammar"


def check_grammar(fields: Fields, tool_use: ToolUse | None) -> None:
    """Raises `FieldError` if the request needs a grammar: for a JSON schema, a forced call, or strict arguments."""
    form = Fields(fields.get("response_format", {"type": "text"}), "response_format.")
    if form.text("type") != "text":
        raise fields.error("response_format", f'is supported only as {{"type": "text"}}: {REASON}')
    if tool_use is None:
        return
    if tool_use.choice not in ("none", "auto"):
        raise fields.error("tool_choice", f'is supported only as "none" or "auto": {REASON}')
    if tool_use.strict_names and tool_use.choice != "none":
        index = next(i for i, tool in enumerate(tool_use.tools) if tool["function"]["name"] in tool_use.strict_names)
        function = Fields(tool_use.tools[index]["function"], f"tools[{index}].function.")
        raise function.error("strict", f"is supported only as false: {REASON}")
