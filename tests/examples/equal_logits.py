"""A tiny model whose logits are all equal, so that only the grammar and `logit_bias` choose its tokens."""

import json

import tokenizers

from tests.examples.scripted_engine import parts
from tests.examples.serving import make_service
from tests.examples.tiny_checkpoint import changed_tensors, write_checkpoint

MESSAGES = "{% for m in messages %}<eos>{{ m.content }}{% endfor %}"
HARMONY_MARKS = ["start", "channel", "message", "end", "constrain", "call"]
# The tokenizer's special tokens, its other added tokens, and the end of its chat template.
KINDS = {
    "thoughts": (
        ["[TOOL_CALLS]", "[ARGS]", "<|python_tag|>"],
        [
            *("<think>", "</think>", "<tool_call>", "</tool_call>"),
            *(f"<｜tool▁{name}｜>" for name in ("calls▁begin", "call▁begin", "sep", "call▁end", "calls▁end")),
            *(". <tool_call>\n", '{"name": "', 'forecast"', " now", '{"type": "function", "name": "forecast", "'),
        ],
        "{% if enable_thinking is defined %}<think>{{ '' if enable_thinking else '</think>' }}{% endif %}",
    ),
    "harmony": (
        [f"<|{mark}|>" for mark in HARMONY_MARKS],
        ["assistant", "analysis", "commentary", "final", " to=functions.", "forecast", " json", "now"],
        "<|start|>assistant",
    ),
}


def equal_service(folder, kind):
    """A service with one of the tokenizers."""
    special, others, end = KINDS[kind]
    write_checkpoint(folder, max_position_embeddings=512)
    with changed_tensors(folder / "model.safetensors") as tensors:
        tensors["lm_head.weight"][:] = 0
    file = folder / "tokenizer.json"
    tokenizer = tokenizers.Tokenizer.from_file(str(file))
    vocabulary = json.loads(file.read_text())["model"]["vocab"] | {
        text: 256 + i for i, text in enumerate([*special, *others])
    }
    fields = json.loads(tokenizer.to_str())
    fields["model"]["vocab"] = vocabulary
    tokenizer = tokenizers.Tokenizer.from_str(json.dumps(fields))
    tokenizer.add_special_tokens(special)
    tokenizer.add_tokens(others)
    tokenizer.save(str(file))
    config = {"chat_template": MESSAGES + end, "eos_token": "<eos>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return make_service(folder, "--max-model-len=300", "--served-model-name=model")


def bias(server, weights):
    """A `logit_bias` from the weights of tokens, if the model has them."""
    ids = (
        (server.service.checkpoint.tokenizer.tokenizer.token_to_id(token), weight) for token, weight in weights.items()
    )
    return {str(token): weight for token, weight in ids if token is not None}


def all_parts(choice):
    """Reasoning, content and calls of a choice of a chat."""
    found = parts(choice)
    return found.reasoning, found.content or "", found.calls, found.reason
