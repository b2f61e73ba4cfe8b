"""Request fields of OpenAI's and vLLM's APIs that are not implemented: some are ignored, others refused.

https://platform.openai.com/docs/api-reference
https://docs.vllm.ai/en/latest/serving/openai_compatible_server.html
"""

from typing import Any

from lib.fields import Fields

# Ignored: no value changes the answer.
IGNORED = {"user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key"}
IGNORED |= {"prompt_cache_retention", "request_id", "session_id", "stream_interval"}
IGNORED |= {"spaces_between_special_tokens", "truncation_side", "return_token_offsets"}

# Refused unless the value is null or one of these, which do not change the answer.
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "length_penalty": (1,),
    "logits_processors": ([],),
    "best_of": (1,),
    "use_beam_search": (False,),
    "early_stopping": (False,),
    "thinking_token_budget": (-1,),
    "priority": (0,),
    "return_tokens_as_token_ids": (False,),
    "vllm_xargs": ({},),
}
NEUTRAL_IN_TEXT: dict[str, tuple[Any, ...]] = {"suffix": ("",), "top_logprobs": (0,)}
NEUTRAL_IN_CHAT: dict[str, tuple[Any, ...]] = {
    "echo": (False,),
    "add_special_tokens": (False,),
    "include_reasoning": (True,),
    "modalities": (["text"],),
    "verbosity": ("medium",),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "mm_processor_kwargs": ({},),
    "media_io_kwargs": ({},),
}


def refuse_unread(fields: Fields, neutral: dict[str, tuple[Any, ...]]) -> None:
    """Raises `FieldError` for a field that would change the answer and was not read."""
    for name, value in fields.values.items():
        if name in fields.read | IGNORED or value is None or value in neutral.get(name, ()):
            continue
        shown = name[:100] if name.isidentifier() else repr(name[:100])  # a name may contain anything
        raise fields.error(shown, "is not supported here; leave it out")
