"""From a Hugging Face config to one of llama.py: Llama, Mistral, Qwen2, Qwen3, Gemma 2, Gemma 3, gpt-oss, DeepSeek V2
and V3.

A missing field has the default of transformers. What llama.py does not compute is refused by name.
"""

import math
from typing import Any, Literal

import jaxpaged
from lib.fields import Fields
from lib.llama_config import LatentConfig, LlamaConfig
from lib.routed_experts import Routing

# Upper limits of a config. All are beyond any real model, and small enough to calculate shapes with.
MOST_TOKENS, MOST_FEATURES, MOST_LAYERS, MOST_HEADS, MOST_HEAD_DIM = 2**24, 2**20, 2**12, 2**12, 2**10
THETAS = 1, 1e30
FACTORS = 1e-3, 1e9

GEMMA = dict(
    head_dim=256,
    hidden_activation="gelu_pytorch_tanh",
    query_pre_attn_scalar=256,
    sliding_window=4096,
    tie_word_embeddings=True,
)
QWEN = dict(sliding_window=4096, max_window_layers=28, use_sliding_window=False)
GPT_OSS_ROPE = dict(rope_type="yarn", factor=32.0, truncate=False, original_max_position_embeddings=4096)
# What the published configs of each family leave out. The config of a Gemma 3 with images leaves out most.
DEFAULTS: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": dict(sliding_window=4096),
    "qwen2": QWEN,
    "qwen3": QWEN | dict(head_dim=128),
    "gemma2": GEMMA | dict(attn_logit_softcapping=50.0, final_logit_softcapping=30.0, sliding_window_pattern=2),
    "gemma3_text": GEMMA
    | dict(
        vocab_size=262_208,
        num_attention_heads=8,
        num_key_value_heads=4,
        max_position_embeddings=131_072,
        rms_norm_eps=1e-6,
        rope_theta=1e6,
        rope_local_base_freq=1e4,
        sliding_window_pattern=6,
    ),
    "gpt_oss": dict(
        head_dim=64,
        attention_bias=True,
        sliding_window=128,
        sliding_window_pattern=2,
        rope_theta=150_000.0,
        rope_scaling=GPT_OSS_ROPE,
        swiglu_alpha=1.702,
        swiglu_limit=7.0,
    ),
    "deepseek_v2": dict(topk_method="greedy", scoring_func="softmax", moe_layer_freq=1, routed_scaling_factor=1.0),
    "deepseek_v3": dict(
        topk_method="noaux_tc",
        scoring_func="sigmoid",
        moe_layer_freq=1,
        rope_interleave=True,
        norm_topk_prob=True,
        routed_scaling_factor=2.5,
    ),
}
# What no field of a config tells.
GEMMA_MODEL = dict(use_post_norms=True, norm_plus_one=True)
MODELS: dict[str, dict[str, Any]] = {
    "qwen2": dict(attention_bias=True, output_bias=False),
    "qwen3": dict(use_qk_norm=True),
    "gemma2": GEMMA_MODEL,
    "gemma3_text": GEMMA_MODEL | dict(use_qk_norm=True),
    "gpt_oss": dict(use_sinks=True),
}
# What transformers computes and llama.py does not: only these values are taken.
ONLY = {"partial_rotary_factor": 1.0, "use_bidirectional_attention": False}


def read_config(fields: Fields) -> LlamaConfig:
    """Raises `KeyError` if a field is missing, `ValueError` if one is wrong or unknown."""
    family = fields.get("model_type", None)
    if family == "gemma3":  # reads images too; its language model is taken
        _check_weights(fields, family)
        return read_config(Fields({**fields.get("text_config"), "model_type": "gemma3_text"}))
    if family not in DEFAULTS:
        raise ValueError(f"it is of the type {family!r}; known here are {', '.join(DEFAULTS)}")
    fields = Fields(DEFAULTS[family] | fields.values)
    _check_weights(fields, family)
    for name, known in ONLY.items():
        _only(fields, name, known)
    num_heads = fields.whole("num_attention_heads", 1, MOST_HEADS)
    num_layers = fields.whole("num_hidden_layers", 1, MOST_LAYERS)
    features = fields.whole("hidden_size", 1, MOST_FEATURES)
    is_latent = family.startswith("deepseek")
    # Of a latent model the numbers that are rotated.
    rotated = fields.get("qk_rope_head_dim") if is_latent else fields.get("head_dim", features // num_heads)
    head_dim = Fields({"head_dim": rotated}).whole("head_dim", 1, MOST_HEAD_DIM)
    context = fields.whole("max_position_embeddings", 1, MOST_TOKENS)
    frequencies, window_frequencies, factor = _rotary(fields, family, head_dim, context)
    has_bias = fields.flag("attention_bias", False)
    config = dict(
        vocab_size=fields.whole("vocab_size", 1, MOST_TOKENS),
        context=context,
        features=features,
        hidden_features=fields.whole("intermediate_size", 1, MOST_FEATURES),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=fields.whole("num_key_value_heads", 1, MOST_HEADS, num_heads),
        head_dim=head_dim,
        norm_epsilon=fields.real("rms_norm_eps", 0, 1),
        rotary_frequencies=frequencies,
        attention_bias=has_bias,
        output_bias=has_bias,
        mlp_bias=fields.flag("mlp_bias", False),
        tie_embeddings=fields.flag("tie_word_embeddings", False),
        windows=_windows(fields, family, num_layers),
        window_frequencies=window_frequencies,
        scale=fields.real("query_pre_attn_scalar", *FACTORS, head_dim) ** -0.5 * factor**2,
        logits_soft_cap=_cap(fields, "attn_logit_softcapping"),
        final_soft_cap=_cap(fields, "final_logit_softcapping"),
        activation=_activation(fields),
        embedding_scale=features**0.5 if family in ("gemma2", "gemma3_text") else 1.0,
    )
    if family == "gpt_oss":
        config |= _experts(fields)
    if is_latent:
        config |= _latent(fields, family, factor) | dict(routing=_routing(fields, family, num_layers))
    return LlamaConfig(**config | MODELS.get(family, {}))


def _only(fields: Fields, name: str, known: Any) -> None:
    if fields.get(name, known) != known:
        raise ValueError(f"its {name} is {str(fields.get(name))[:60]}, which is not known here")


def _check_weights(fields: Fields, family: str) -> None:
    """Raises `ValueError` for weights that checkpoint.py cannot widen: it knows gpt-oss in MXFP4, and DeepSeek V3."""
    method = Fields(fields.get("quantization_config", {})).get("quant_method", None)
    if method is not None and (family, method) not in (("gpt_oss", "mxfp4"), ("deepseek_v3", "fp8")):
        raise ValueError(f"its quantization_config is of the method {str(method)[:60]!r}, which is not known here")


def _activation(fields: Fields) -> Literal["silu", "gelu"]:
    match fields.get("hidden_activation", fields.get("hidden_act", "silu")):
        case "silu":
            return "silu"
        case "gelu_pytorch_tanh":
            return "gelu"
        case other:
            raise ValueError(f"it has the activation {str(other)[:60]!r}; known here are silu and gelu_pytorch_tanh")


def _cap(fields: Fields, name: str) -> float | None:
    return None if fields.get(name, None) is None else fields.real(name, *FACTORS)


def _experts(fields: Fields) -> dict[str, Any]:
    num_experts = fields.whole("num_local_experts", 1, MOST_HEADS)
    return dict(
        num_experts=num_experts,
        experts_per_token=fields.whole("num_experts_per_tok", 1, num_experts),
        swiglu_alpha=fields.real("swiglu_alpha", *FACTORS),
        swiglu_limit=fields.real("swiglu_limit", *FACTORS),
    )


def _latent(fields: Fields, family: str, factor: float) -> dict[str, Any]:
    """DeepSeek's attention. YaRN's `mscale_all_dim` is of all logits, not only of what is rotated."""
    plain, rotary = (fields.whole(f"qk_{part}_head_dim", 1, MOST_HEAD_DIM) for part in ("nope", "rope"))
    rope = Fields(fields.get("rope_parameters", None) or fields.get("rope_scaling", None) or {})
    scaling = rope.get("rope_type", rope.get("type", "default"))
    mscale = 1.0
    if scaling != "default" and rope.get("mscale_all_dim", 0):
        mscale += 0.1 * rope.real("mscale_all_dim", *FACTORS) * math.log(max(rope.real("factor", *FACTORS), 1.0))
    rank = None if fields.get("q_lora_rank", None) is None else fields.whole("q_lora_rank", 1, MOST_FEATURES)
    return dict(
        num_kv_heads=1,
        head_dim=plain,
        scale=(plain + rotary) ** -0.5 * mscale**2,
        latent=LatentConfig(
            latent_dim=fields.whole("kv_lora_rank", 1, MOST_FEATURES),
            rotary_dim=rotary,
            value_dim=fields.whole("v_head_dim", 1, MOST_HEAD_DIM),
            query_rank=rank,
            rotary_factor=factor,
            interleaved=fields.flag("rope_interleave", True),
        ),
    )


def _routing(fields: Fields, family: str, num_layers: int) -> Routing | None:
    first = fields.whole("first_k_dense_replace", 0, MOST_LAYERS, 0)
    if first >= num_layers:
        return None
    is_v3 = family == "deepseek_v3"
    for name in ("scoring_func", "moe_layer_freq"):
        _only(fields, name, DEFAULTS[family][name])
    if not is_v3:
        _only(fields, "norm_topk_prob", False)
    known = ("noaux_tc",) if is_v3 else ("greedy", "group_limited_greedy")
    if (method := fields.get("topk_method")) not in known:
        raise ValueError(f"its topk_method is {str(method)[:60]!r}; known here are {', '.join(known)}")
    experts = fields.whole("n_routed_experts", 1, MOST_HEADS)
    groups = 1 if method == "greedy" else fields.whole("n_group", 1, experts)
    if experts % groups:
        raise ValueError(f"its {experts} experts do not go evenly into {groups} groups")
    hidden = fields.whole("moe_intermediate_size", 1, MOST_FEATURES)
    return Routing(
        num_experts=experts,
        experts_per_token=fields.whole("num_experts_per_tok", 1, experts),
        hidden_features=hidden,
        shared_features=hidden * fields.whole("n_shared_experts", 1, MOST_HEADS),
        first_layer=first,
        scoring="sigmoid" if is_v3 else "softmax",
        has_bias=is_v3,
        num_groups=groups,
        groups_per_token=groups if groups == 1 else fields.whole("topk_group", 1, groups),
        normalise=is_v3 and fields.flag("norm_topk_prob", True),
        scaling=fields.real("routed_scaling_factor", *FACTORS),
    )


def _windows(fields: Fields, family: str, num_layers: int) -> tuple[int | None, ...] | None:
    if family.startswith("deepseek"):
        return None
    if family in ("llama", "mistral"):
        _only(fields, "layer_types", None)
    is_used = fields.flag("use_sliding_window", "use_sliding_window" not in DEFAULTS[family])
    has_none = fields.get("sliding_window", None) is None or not is_used
    if family == "llama" or (has_none and family in ("mistral", "qwen2", "qwen3")):
        return None
    window = fields.whole("sliding_window", 1, MOST_TOKENS)
    if "sliding_window_pattern" in DEFAULTS[family]:
        period = fields.whole("sliding_window_pattern", 1, MOST_LAYERS)  # the last layer of each sees all
        has_window = [(i + 1) % period != 0 for i in range(num_layers)]
    else:
        first = fields.whole("max_window_layers", 0, MOST_LAYERS, 0)
        has_window = [i >= first for i in range(num_layers)]
    usual = ["sliding_attention" if it_has else "full_attention" for it_has in has_window]
    kinds = fields.get("layer_types", usual)
    known = "sliding_attention", "full_attention"
    if not isinstance(kinds, list) or len(kinds) != num_layers or any(kind not in known for kind in kinds):
        raise ValueError(f"layer_types must be {num_layers} of {', '.join(known)}; got {str(kinds)[:60]}")
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)


Frequencies = tuple[float, ...]


def _rotary(fields: Fields, family: str, head_dim: int, context: int) -> tuple[Frequencies, Frequencies | None, float]:
    """The frequencies, other ones for layers with a window if they differ, and the factor of q and k."""
    rope = Fields(fields.get("rope_parameters", None) or fields.get("rope_scaling", None) or {})
    theta = fields.real("rope_theta", *THETAS, 10_000.0)
    if family != "gemma3_text":
        frequencies, factor = scaled_frequencies(rope, theta, head_dim, context)
        return frequencies, None, factor
    kinds = (
        rope
        if {"full_attention", "sliding_attention"} & rope.values.keys()
        else Fields({"full_attention": rope.values})
    )
    window_theta = fields.real("rope_local_base_freq", *THETAS)
    frequencies, factor = scaled_frequencies(Fields(kinds.get("full_attention", {})), theta, head_dim, context)
    of_windows, their_factor = scaled_frequencies(
        Fields(kinds.get("sliding_attention", {})), window_theta, head_dim, context
    )
    if factor != their_factor:
        raise ValueError(
            f"its rotary embedding has the factor {factor:g}, with windows {their_factor:g}; known here is 1"
        )
    return frequencies, of_windows, factor


def scaled_frequencies(rope: Fields, theta: float, head_dim: int, context: int) -> tuple[Frequencies, float]:
    """The frequencies, and the factor of q and k. `rope` may hold another theta."""
    _only(rope, "partial_rotary_factor", 1.0)
    _only(rope, "mrope_section", None)
    theta = rope.real("rope_theta", *THETAS, theta)
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind not in ("default", "linear", "llama3", "yarn", "dynamic"):
        raise ValueError(f"its rotary embedding is scaled by {str(kind)[:60]!r}, which is not known here")
    scaling: dict[str, Any] = {"rope_type": kind}
    if kind != "default":
        scaling["factor"] = rope.real("factor", *FACTORS)
    if kind in ("llama3", "yarn"):
        scaling["original_max_position_embeddings"] = rope.whole("original_max_position_embeddings", 1, MOST_TOKENS)
    if kind == "llama3":
        scaling |= {name: rope.real(name, *FACTORS) for name in ("low_freq_factor", "high_freq_factor")}
    if kind == "yarn":
        names = "beta_fast", "beta_slow", "attention_factor", "mscale", "mscale_all_dim"
        scaling |= {name: rope.real(name, *FACTORS) for name in names if rope.get(name, None) is not None}
        scaling["truncate"] = rope.flag("truncate", True)
    if kind == "dynamic":  # begins past the context, which these models never leave
        scaling["original_max_position_embeddings"] = context
    frequencies = jaxpaged.rotary_frequencies(head_dim, theta, scaling, max_length=context)
    return frequencies, jaxpaged.rotary_attention_factor(scaling)
