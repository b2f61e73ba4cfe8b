"""How models write tool calls: one entry for each format. To support another, add it to `FORMATS`."""

import dataclasses
import re

NAME = r"(?P<name>[\w.-]{1,64})"


@dataclasses.dataclass(frozen=True)
class ToolFormat:
    """A call is what `begin` matches, then JSON, then what `end` and `after` match, if it is there.

    The JSON is an object with the arguments if `begin` has a group "name". Otherwise it is an object with the name and
    the arguments, or an array of such objects. White space around calls is dropped. The patterns belong
    to the package `regex`, whose partial matches tell that a text may become a mark when it grows. A pattern that
    matches a text must not match its beginning, because it would not wait for the rest.

    Attributes:
        begin: text before the JSON of a call.
        end: text after it.
        after: text between two calls, or after the last.
        arguments: key of the arguments in an object that has the name too.
        in_template: pattern in the chat templates with this format.
        marks: control tokens that the patterns need to see; other control tokens are not part of the text.
        id_characters: length of a call's id, if templates prescribe one.
        mark: mark that begins a call, for grammars; empty: the JSON begins it.
        written: how a call goes on after the mark, by a text in the chat template; the first found counts. It has
            {name} and {arguments}, or an object {call}, or {calls} of an array; {space} is optional, {id} is any word.
            Empty: calls are messages of gpt-oss.
    """

    begin: str
    end: str
    arguments: str
    in_template: str
    after: str = ""
    marks: tuple[str, ...] = ()
    id_characters: int | None = None
    mark: str = ""
    written: dict[str, str] = dataclasses.field(default_factory=dict)

    @property
    def without_marks(self) -> "ToolFormat":
        """The form of calls that a grammar forces: an object with the name and the arguments, or an array of these.

        It has no marks, because most are control tokens, which grammars never allow.
        """
        return dataclasses.replace(
            self, begin=r"(?=[\[{])", end="", after="", marks=(), arguments=self.arguments or "arguments"
        )


# By vLLM's names of their parsers. The first that a template matches counts.
FORMATS = {
    # gpt-oss: <|channel|>commentary to=functions.NAME <|constrain|>json<|message|>{...}<|call|>, which
    # `reasoning.Channels` reduces to what is matched here.
    "openai": ToolFormat(
        begin=rf"to=functions\.{NAME}<\|message\|>",
        end=r"\s*<\|call\|>",
        arguments="",
        in_template=r"<\|channel\|>",
    ),
    # DeepSeek V3 and R1 put the arguments between fences, after the word "function"; V3.1 only has the name.
    "deepseek_v3": ToolFormat(
        begin=(
            r"(?:<｜tool▁calls▁begin｜>\s*)?<｜tool▁call▁begin｜>"
            rf"(?:function<｜tool▁sep｜>{NAME}\n```json\n|(?!function<){NAME}<｜tool▁sep｜>)"
        ),
        end=r"\s*(?:```\s*)?<｜tool▁call▁end｜>",
        after="<｜tool▁calls▁end｜>",
        arguments="",
        in_template="<｜tool▁calls▁begin｜>",
        marks=tuple(f"<｜tool▁{name}｜>" for name in ("calls▁begin", "call▁begin", "sep", "call▁end", "calls▁end")),
        mark="<｜tool▁call▁begin｜>",
        written={
            "```json": "function<｜tool▁sep｜>{name}\n```json\n{arguments}\n```<｜tool▁call▁end｜>",
            "": "{name}<｜tool▁sep｜>{arguments}<｜tool▁call▁end｜>",
        },
    ),
    # Mistral: [TOOL_CALLS][{"name": ..., "arguments": {...}}, ...]; since 2025 [TOOL_CALLS]NAME[ARGS]{...} for each.
    "mistral": ToolFormat(
        begin=rf"\[TOOL_CALLS\]\s*(?:{NAME}(?:\[CALL_ID\]\w*)?\[ARGS\]|(?=[\[{{]))",
        end="",
        arguments="arguments",
        in_template=r"\[TOOL_CALLS\]",
        marks=("[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"),
        id_characters=9,
        mark="[TOOL_CALLS]",
        written={
            "[CALL_ID]": "{name}[CALL_ID]{id}[ARGS]{arguments}",
            "[ARGS]": "{name}[ARGS]{arguments}",
            "": "{space}[{calls}]",
        },
    ),
    # Qwen 2.5 and 3, and Hermes. Templates of other formats between the same marks, in XML, are left out.
    "hermes": ToolFormat(
        begin="<tool_call>",
        end=r"\s*</tool_call>",
        arguments="arguments",
        in_template=r"(?s)^(?!.*(?:<function=|<arg_key>)).*<tool_call>",
        marks=("<tool_call>", "</tool_call>"),
        mark="<tool_call>",
        written={"": "{space}{call}{space}</tool_call>"},
    ),
    # Llama 3.1 to 3.3: {"name": ..., "parameters": {...}}, sometimes after <|python_tag|>; several between semicolons.
    "llama3_json": ToolFormat(
        begin=r'(?:<\|python_tag\|>\s*)?(?=\{\s*"(?:name|type|parameters)"\s*:)',
        end="",
        after=";",
        arguments="parameters",
        in_template=r'<\|python_tag\|>|"parameters": dictionary',
        marks=("<|python_tag|>",),
        written={"": "{call}"},
    ),
}


def for_tools(chat_template: str | dict[str, str] | None) -> str:
    """The chat template, or its variant for tools."""
    if isinstance(chat_template, dict):
        chat_template = chat_template.get("tool_use", chat_template.get("default"))
    return chat_template or ""


def find_format(chat_template: str | dict[str, str] | None) -> ToolFormat | None:
    """The format of a chat template. None: none of these."""
    found = (each for each in FORMATS.values() if re.search(each.in_template, for_tools(chat_template)))
    return next(found, None)
