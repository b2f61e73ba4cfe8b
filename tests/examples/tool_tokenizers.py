"""Tokenizers with the control tokens of tool calls, and a chat template that writes everything that it gets."""

import functools

from lib.tokenizer import Tokenizer
from tests.examples.tiny_tokenizers import byte_level

HARMONY = ("<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|constrain|>", "<|call|>")
OTHERS = ("<|python_tag|>", "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]", "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>")
TEMPLATE = (
    "{%- for tool in tools or [] %}{{ tool.function | tojson }}{% endfor %}"
    "{%- for message in messages %}[{{ message.role }}]{{ message.reasoning_content }}{{ message.content }}"
    "{%- for call in message.tool_calls or [] %}"
    "{{ call.id }} {{ call.function.name }}{{ call.function.arguments | tojson }}"
    "{%- endfor %}{{ message.tool_call_id }}{% endfor %}[assistant]"
)


@functools.cache
def make_tokenizer(is_harmony):
    """A tokenizer with control tokens of gpt-oss, or of all others. It is shared, as is the process of its template."""
    tokenizer = byte_level()
    tokenizer.add_special_tokens(list(HARMONY if is_harmony else OTHERS))
    return Tokenizer(tokenizer, (tokenizer.token_to_id("</s>"),), TEMPLATE, {"eos_token": "</s>"})
