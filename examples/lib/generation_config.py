"""Reads a folder's generation_config.json: end-of-text tokens and sampling defaults."""

import logging
from pathlib import Path

from transformers import GenerationConfig

from lib.checkpoint import READ_ERRORS, one_line
from lib.fields import MOST_TOKENS, Fields, read_json

FILE = "generation_config.json"
# Fields that change sampling and are not implemented here, with their neutral values.
NOT_APPLIED = {
    "repetition_penalty": 1.0,
    "encoder_repetition_penalty": 1.0,
    "no_repeat_ngram_size": 0,
    "min_p": 0.0,
    "top_h": None,
    "typical_p": 1.0,
    "epsilon_cutoff": 0.0,
    "eta_cutoff": 0.0,
    "num_beams": 1,
    "guidance_scale": 1.0,
    "bad_words_ids": None,
    "suppress_tokens": None,
    "begin_suppress_tokens": None,
    "sequence_bias": None,
    "forced_bos_token_id": None,
    "forced_eos_token_id": None,
}


def read_generation_config(folder: Path) -> Fields:
    """The file's fields, none if the folder has no such file. Raises `ValueError`."""
    if not (folder / FILE).is_file():
        return Fields({})
    fields = read_json(folder / FILE)
    try:
        return Fields(GenerationConfig(**fields.values).to_dict())
    except READ_ERRORS as error:
        raise ValueError(f"{FILE}: {one_line(error)}") from error


def sampling_defaults(generation: Fields) -> dict[str, float]:
    """The file's temperature, top_p and top_k. The temperature is 0 if `do_sample` is false."""
    if not generation.flag("do_sample", True):
        return {"temperature": 0.0}
    for name, neutral in NOT_APPLIED.items():
        if (value := generation.get(name, neutral)) != neutral:
            logging.warning("%s sets %s to %s, which is not applied here.", FILE, name, str(value)[:60])
    defaults: dict[str, float] = {}
    for name, least, most in (("temperature", 0.0, 1e9), ("top_p", 1e-9, 1.0)):
        if generation.get(name, None) is not None:
            defaults[name] = generation.real(name, least, most)
    if (top_k := generation.whole("top_k", -1, 2**31 - 1, 0)) > 0:  # 0 and -1: all tokens
        defaults["top_k"] = top_k
    return defaults


def eos_ids(config: Fields, generation: Fields, tokenizer_eos: int | None) -> tuple[int, ...]:
    """All end-of-text tokens of config.json, generation_config.json and the tokenizer."""
    found: dict[int, None] = {}
    for fields in (generation, config, Fields({"eos_token_id": tokenizer_eos})):
        named = fields.get("eos_token_id", [])
        for eos in named if isinstance(named, list) else [named]:
            found[Fields({"eos_token_id": eos}).whole("eos_token_id", 0, MOST_TOKENS)] = None
    return tuple(found)
