"""Reads the fields of a request that change logits: penalties, biases, allowed tokens, bad words, `min_tokens`.

https://platform.openai.com/docs/api-reference
https://docs.vllm.ai/en/latest/api/vllm/sampling_params.html
"""

from collections.abc import Sequence
from typing import Any

from jaxpaged import EngineOptions, SamplingParams
from lib.api_error import ApiError
from lib.fields import Fields, is_whole
from lib.tokenizer import Tokenizer

MOST_LISTED = EngineOptions.num_listed_tokens  # in all of LISTS together; OpenAI accepts 300 biases
MOST_WORDS, MOST_WORD_CHARACTERS = 64, 200
LISTS = "logit_bias", "allowed_token_ids", "bad_words"


def read_logit_params(fields: Fields, vocab_size: int) -> dict[str, Any]:
    """Arguments of `SamplingParams`: all but `min_tokens`, which depends on `max_tokens`, and `bad_words`."""
    return dict(
        presence_penalty=fields.real("presence_penalty", -2, 2, 0),
        frequency_penalty=fields.real("frequency_penalty", -2, 2, 0),
        repetition_penalty=fields.real("repetition_penalty", 1e-3, 1e3, 1),
        logit_bias=_logit_bias(fields, vocab_size),
        allowed_token_ids=_allowed_ids(fields, vocab_size),
    )


def read_bad_words(fields: Fields) -> list[str]:
    clause = f"must be a text or at most {MOST_WORDS} texts, each of 1 to {MOST_WORD_CHARACTERS} characters"

    def is_word(word: Any) -> bool:
        return isinstance(word, str) and bool(word.strip()) and len(word) <= MOST_WORD_CHARACTERS

    return fields.items("bad_words", is_word, clause, MOST_WORDS)


def read_min_tokens(fields: Fields, max_tokens: int | None) -> int:
    min_tokens = fields.whole("min_tokens", 0, 2**31 - 1, 0)
    if max_tokens is not None and min_tokens > max(max_tokens, 1):
        raise fields.error("min_tokens", f"must be at most max_tokens; got {min_tokens}")
    return min_tokens


def encode_bad_words(tokenizer: Tokenizer, words: Sequence[str]) -> list[list[int]]:
    """The token ids of each word, at the beginning of a text and, if that differs in its first token, after a space.

    As in vLLM, both spellings must have the same number of tokens.
    """
    found = []
    for word in words:
        texts = word.lstrip(), " " + word.lstrip()
        plain, spaced = (tokenizer.encode(text, add_special_tokens=False) for text in texts)
        found += [plain] if plain else []
        if spaced and len(spaced) == len(plain) and spaced[0] != plain[0]:
            found.append(spaced)
    return found


def check_num_listed(params: SamplingParams) -> None:
    """Raises `ApiError` if a request lists too many tokens."""
    sizes = len(params.logit_bias), len(params.allowed_token_ids or ()), sum(map(len, params.bad_words))
    if sum(sizes) > MOST_LISTED:
        message = f"{', '.join(LISTS[:2])} and {LISTS[2]} list {sum(sizes)} tokens together; a request has at most"
        raise ApiError(400, f"{message} {MOST_LISTED} here.", param=LISTS[sizes.index(max(sizes))])


def _logit_bias(fields: Fields, vocab_size: int) -> dict[int, float]:
    ids = f"token ids from 0 to {vocab_size - 1}"
    clause = f"must be an object of at most {MOST_LISTED} {ids}, each with a number from -100 to 100"
    bias = fields.get("logit_bias", {})
    if not isinstance(bias, dict) or len(bias) > MOST_LISTED:
        raise fields.error("logit_bias", clause)
    if not all(key.isascii() and key.isdecimal() and len(key) < 10 and int(key) < vocab_size for key in bias):
        raise fields.error("logit_bias", clause)
    values = Fields(bias)
    try:
        return {int(token): values.real(token, -100, 100) for token in bias}
    except (KeyError, ValueError):
        raise fields.error("logit_bias", clause) from None


def _allowed_ids(fields: Fields, vocab_size: int) -> list[int] | None:
    allowed = fields.get("allowed_token_ids", None)
    if allowed is None:
        return None
    is_list = isinstance(allowed, list) and 0 < len(allowed) <= MOST_LISTED
    if not is_list or not all(is_whole(token) and 0 <= token < vocab_size for token in allowed):
        clause = f"must be 1 to {MOST_LISTED} token ids from 0 to {vocab_size - 1}"
        raise fields.error("allowed_token_ids", clause)
    return allowed
