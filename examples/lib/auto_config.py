"""Reads config.json of a Hugging Face folder with transformers, which adds the defaults of the model's family.

transformers accepts unknown fields. They may change the model's results, so they are refused here by name. Sizes are
bounded before transformers computes with them.
"""

import dataclasses
import logging
import re
from collections.abc import Container
from typing import Any

from huggingface_hub.errors import StrictDataclassError
from transformers import CONFIG_MAPPING, GenerationConfig, PreTrainedConfig

from lib.checkpoint import READ_ERRORS, one_line
from lib.fields import (
    FACTORS,
    MOST_FEATURES,
    MOST_HEAD_DIM,
    MOST_HEADS,
    MOST_LAYERS,
    MOST_TOKENS,
    THETAS,
    Fields,
)

FAMILIES = (
    "llama",
    "mistral",
    "mixtral",
    "qwen2",
    "qwen3",
    "qwen3_moe",
    "gemma2",
    "gemma3_text",
    "gpt_oss",
    "deepseek_v2",
    "deepseek_v3",
)
# Upper limits of whole numbers, from 1 on, and the ranges of other numbers.
WHOLE = (
    dict.fromkeys(
        ("vocab_size", "max_position_embeddings", "sliding_window", "original_max_position_embeddings"), MOST_TOKENS
    )
    | dict.fromkeys(("num_hidden_layers", "sliding_window_pattern", "decoder_sparse_step"), MOST_LAYERS)
    | dict.fromkeys(("num_attention_heads", "num_key_value_heads"), MOST_HEADS)
    | dict.fromkeys(("num_local_experts", "num_experts", "n_routed_experts", "n_shared_experts"), MOST_HEADS)
    | dict.fromkeys(("hidden_size", "intermediate_size", "moe_intermediate_size"), MOST_FEATURES)
    | dict.fromkeys(("kv_lora_rank", "q_lora_rank"), MOST_FEATURES)
    | dict.fromkeys(("head_dim", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"), MOST_HEAD_DIM)
)
REAL = (
    {"rms_norm_eps": (0, 1), "rope_theta": THETAS, "rope_local_base_freq": THETAS}
    | dict.fromkeys(("query_pre_attn_scalar", "attn_logit_softcapping", "final_logit_softcapping"), FACTORS)
    | dict.fromkeys(("swiglu_alpha", "swiglu_limit", "routed_scaling_factor"), FACTORS)
    | dict.fromkeys(("factor", "low_freq_factor", "high_freq_factor", "beta_fast", "beta_slow"), FACTORS)
    | dict.fromkeys(("attention_factor", "mscale", "mscale_all_dim"), FACTORS)
)
# Fields with a single supported value, for all families and for one.
ONLY = {
    "partial_rotary_factor": 1.0,
    "use_bidirectional_attention": False,
    "is_causal": True,
    "rope_interleaved": False,
    "use_mrope": False,
}
ONLY_IN: dict[str, dict[str, Any]] = {
    "llama": dict(is_llama_config=True, activation="swiglu"),
    "mistral": dict(attention_bias=False, mlp_bias=False),
    "qwen2": dict(attention_bias=True, mlp_bias=False),
    "gemma2": dict(sliding_window_pattern=2),
    "deepseek_v2": dict(scoring_func="softmax", moe_layer_freq=1, norm_topk_prob=False),
    "deepseek_v3": dict(scoring_func="sigmoid", moe_layer_freq=1, topk_method="noaux_tc"),
}
# Fields that a config class reads without declaring them.
READ_TOO = {
    "qwen2": ("head_dim",),
    "qwen3_moe": ("head_dim",),
    "gemma3_text": ("rope_local_base_freq", "sliding_window_pattern"),
    "deepseek_v3": ("head_dim",),
}
# Fields without effect on results: about files or training, or copies of other fields.
HARMLESS = {
    *("model_type", "auto_map", "torch_dtype", "quantization_config", "tokenizer_class", "transformers.js_config"),
    *("torchscript", "use_bfloat16", "tf_legacy_loss", "num_labels", "attn_implementation", "use_return_dict"),
    *("pruned_heads", "finetuning_task", "task_specific_params", "prefix", "sep_token_id", "is_decoder"),
    *("add_cross_attention", "cross_attention_hidden_size", "tie_encoder_decoder", "classifier_dropout"),
    *("unsloth_fixed", "unsloth_version", "neftune_noise_alpha", "aux_loss_alpha", "seq_aux", "ep_size"),
    *("model_max_length", "max_sequence_length", "initial_context_length"),
    *("hidden_act", "sliding_window_size", "experts_per_token", "qk_head_dim", "max_window_layers"),
}
OF_ALL_MODELS = {*(field.name for field in dataclasses.fields(PreTrainedConfig)), *GenerationConfig().to_dict()}
ROPE_KINDS = "default", "linear", "llama3", "yarn", "dynamic"
ROPE = {
    *("rope_type", "type", "rope_theta", "factor", "original_max_position_embeddings", "low_freq_factor"),
    *("high_freq_factor", "beta_fast", "beta_slow", "attention_factor", "mscale", "mscale_all_dim", "truncate"),
    "finetuned",
}
LAYER_KINDS = "sliding_attention", "full_attention"


def read_auto_config(fields: Fields) -> Fields:
    """All fields of a config.json with their defaults. For a model that also reads images, its language model's fields.

    Raises `KeyError` if a field is missing, `ValueError` if one is wrong or unknown.
    """
    family = fields.get("model_type", None)
    if family == "gemma3":
        _check_names(fields, {*_declared(family), *HARMLESS}, {})
        text, tied = Fields(fields.get("text_config")), fields.flag("tie_word_embeddings", True)
        return read_auto_config(Fields({**text.values, "model_type": "gemma3_text", "tie_word_embeddings": tied}))
    if family not in FAMILIES:
        raise ValueError(f"it is of the type {family!r}; known here are {', '.join((*FAMILIES, 'gemma3'))}")
    if re.search(r"Classification|QuestionAnswering", architectures := str(fields.get("architectures", ""))):
        raise ValueError(f"its architectures is {architectures[:60]}, which makes no text")
    declared, undeclared = _declared(family), {"rope_theta", "rope_scaling", *READ_TOO.get(family, ())}
    _check_names(fields, {*declared, *undeclared, *HARMLESS}, ONLY | ONLY_IN.get(family, {}))
    _check_numbers(fields)
    kinds = fields.get("layer_types", None)
    if kinds is not None:
        num_layers = fields.get("num_hidden_layers")
        if not isinstance(kinds, list) or len(kinds) != num_layers or any(kind not in LAYER_KINDS for kind in kinds):
            raise ValueError(f"layer_types must be {num_layers} of {', '.join(LAYER_KINDS)}; got {str(kinds)[:60]}")
    # null means missing for a flag, but may be a setting for a number.
    known = {name: value for name, value in fields.values.items() if name in declared or name in undeclared}
    read = {name: value for name, value in known.items() if value is not None or declared.get(name, bool) is not bool}
    for name in ("rope_parameters", "rope_scaling"):
        if read.get(name) is not None:
            has_kinds = family == "gemma3_text" and name == "rope_parameters"
            read[name] = _by_kind(Fields(read[name])) if has_kinds else _checked_rope(Fields(read[name]))
    config = _construct(family, read)
    theta = config["rope_parameters"].get("rope_theta")
    if (before := (read.get("rope_parameters") or {}).get("rope_theta", theta)) != theta:
        logging.warning(
            "rope_scaling of config.json replaces rope_parameters, and rope_theta is %g instead of %g; write it into "
            "rope_scaling to keep it.",
            *(theta, before),
        )
    return Fields(config)


def _declared(family: str) -> dict[str, Any]:
    """The fields that the family's config class adds to those of every model, with their types or None."""
    cls = CONFIG_MAPPING[family]
    types = dict.fromkeys(cls.attribute_map.values()) | {field.name: field.type for field in dataclasses.fields(cls)}
    return {name: types[name] for name in types.keys() - OF_ALL_MODELS}


def _check_names(fields: Fields, known: Container[str], only: dict[str, Any]) -> None:
    for name, value in fields.values.items():
        if value is None or (name in only and value == only[name]):
            continue
        if name in only:
            raise ValueError(f"its {name} is {str(value)[:60]}, which is not known here")
        if name not in known and name not in OF_ALL_MODELS and not name.startswith("_"):
            raise ValueError(
                f"its {name[:60]} is {str(value)[:60]}, which is not known here; if it changes no result, "
                "delete it from config.json"
            )


def _check_numbers(fields: Fields) -> None:
    for name in WHOLE.keys() & fields.values:
        fields.whole(name, 1, WHOLE[name], 1)
    for name in REAL.keys() & fields.values:
        least, most = REAL[name]
        fields.real(name, least, most, 1.0)


def _by_kind(ropes: Fields) -> dict[str, Any]:
    """The rotary parameters of each kind of layers."""
    _check_names(ropes, LAYER_KINDS, {})
    return {kind: _checked_rope(Fields(rope)) for kind, rope in ropes.values.items() if rope is not None}


def _checked_rope(rope: Fields) -> dict[str, Any]:
    _check_names(rope, ROPE, ONLY)
    _check_numbers(rope)
    rope.flag("truncate", True)
    for name in ("rope_type", "type"):
        if (kind := rope.text(name, "default")) not in ROPE_KINDS:
            raise ValueError(f"its rotary embedding is scaled by {kind[:60]!r}, which is not known here")
    return {name: value for name, value in rope.values.items() if value is not None}


def _construct(family: str, fields: dict[str, Any]) -> dict[str, Any]:
    try:
        return CONFIG_MAPPING[family](**fields).to_dict()
    except (StrictDataclassError, *READ_ERRORS) as error:
        cause = error.__cause__ if isinstance(error.__cause__, Exception) else error  # the field's or the check's
        raise ValueError(one_line(cause).strip('"')) from error
