"""Converts a Hugging Face config to a `LlamaConfig`, for Llama, Mistral, Mixtral, Qwen2, Qwen3, Qwen3-MoE, Gemma 2,
Gemma 3, gpt-oss, and DeepSeek V2 and V3.

Values that llama.py does not support are refused by name.
"""

import math
from typing import Any, Literal

import jaxpaged
from lib.auto_config import read_auto_config
from lib.fields import MOST_LAYERS, MOST_TOKENS, Fields
from lib.llama_config import Clipped, LatentConfig, LlamaConfig, Routing

# Properties of a family that have no field in its config.
GEMMA_MODEL = dict(use_post_norms=True, norm_plus_one=True)
MODELS: dict[str, dict[str, Any]] = {
    "qwen2": dict(attention_bias=True, output_bias=False),
    "qwen3": dict(use_qk_norm=True),
    "qwen3_moe": dict(use_qk_norm=True),
    "gemma2": GEMMA_MODEL,
    "gemma3_text": GEMMA_MODEL | dict(use_qk_norm=True),
    "gpt_oss": dict(use_sinks=True),
}


def read_config(fields: Fields) -> LlamaConfig:
    """Raises `KeyError` if a field is missing, `ValueError` if one is wrong or unknown."""
    _check_weights(fields)
    fields = read_auto_config(fields)
    family = fields.text("model_type")
    is_gemma, is_latent = family.startswith("gemma"), family.startswith("deepseek")
    num_heads, features = fields.get("num_attention_heads"), fields.get("hidden_size")
    head_dim = fields.get("head_dim", features // num_heads)  # latent models: the rotated numbers
    frequencies, window_frequencies, factor, context = _rotary(fields, head_dim)
    has_bias = fields.flag("attention_bias", False)
    config = dict(
        vocab_size=fields.get("vocab_size"),
        context=context,
        features=features,
        hidden_features=fields.get("intermediate_size"),
        num_layers=fields.get("num_hidden_layers"),
        num_heads=num_heads,
        num_kv_heads=fields.get("num_key_value_heads"),
        head_dim=head_dim,
        norm_epsilon=fields.get("rms_norm_eps"),
        rotary_frequencies=frequencies,
        attention_bias=has_bias,
        output_bias=has_bias,
        mlp_bias=fields.flag("mlp_bias", False),
        tie_embeddings=fields.get("tie_word_embeddings"),
        windows=_windows(fields, family),
        window_frequencies=window_frequencies,
        scale=fields.get("query_pre_attn_scalar", head_dim) ** -0.5 * factor**2,
        logits_soft_cap=fields.get("attn_logit_softcapping", None),
        final_soft_cap=fields.get("final_logit_softcapping", None),
        activation=_activation(fields.get("hidden_activation" if is_gemma else "hidden_act")),
        embedding_scale=features**0.5 if is_gemma else 1.0,
    )
    if family == "gpt_oss":
        config |= _experts(fields)
    if is_latent:
        config |= _latent(fields, factor) | dict(routing=_routing(fields, family))
    if family in ("qwen3_moe", "mixtral"):
        config |= dict(routing=_routing_without_groups(fields, family))
    return LlamaConfig(**config | MODELS.get(family, {}))


def _check_weights(fields: Fields) -> None:
    """Raises `ValueError` for quantised weights that cannot be widened here; gpt-oss's MXFP4 and DeepSeek V3 can."""
    family = fields.get("model_type", None)
    method = Fields(fields.get("quantization_config", {})).get("quant_method", None)
    if method is not None and (family, method) not in (("gpt_oss", "mxfp4"), ("deepseek_v3", "fp8")):
        raise ValueError(f"its quantization_config is of the method {str(method)[:60]!r}, which is not known here")


def _activation(name: str) -> Literal["silu", "gelu"]:
    match name:
        case "silu":
            return "silu"
        case "gelu_pytorch_tanh":
            return "gelu"
    raise ValueError(f"it has the activation {name[:60]!r}; known here are silu and gelu_pytorch_tanh")


def _experts(fields: Fields) -> dict[str, Any]:
    num_experts = fields.get("num_local_experts")
    return dict(
        num_experts=num_experts,
        experts_per_token=fields.whole("num_experts_per_tok", 1, num_experts),
        clipped=Clipped(fields.get("swiglu_alpha"), fields.get("swiglu_limit")),
    )


def _latent(fields: Fields, factor: float) -> dict[str, Any]:
    """DeepSeek's attention. YaRN's `mscale_all_dim` scales all logits, not only their rotary part."""
    plain, rotary = fields.get("qk_nope_head_dim"), fields.get("qk_rope_head_dim")
    if (head_dim := fields.get("head_dim")) != rotary:
        raise ValueError(f"its head_dim is {head_dim} and its qk_rope_head_dim {rotary}; known here are equal ones")
    rope, mscale = Fields(fields.get("rope_parameters")), 1.0
    if rope.get("rope_type") != "default" and rope.get("mscale_all_dim", None) is not None:
        mscale += 0.1 * rope.get("mscale_all_dim") * math.log(max(rope.get("factor"), 1.0))
    return dict(
        num_kv_heads=1,
        head_dim=plain,
        scale=(plain + rotary) ** -0.5 * mscale**2,
        latent=LatentConfig(
            kv_lora_rank=fields.get("kv_lora_rank"),
            qk_rope_head_dim=rotary,
            v_head_dim=fields.get("v_head_dim"),
            q_lora_rank=fields.get("q_lora_rank", None),
            rotary_factor=factor,
            interleaved=fields.flag("rope_interleave", True),
        ),
    )


def _routing(fields: Fields, family: str) -> Routing | None:
    first = fields.whole("first_k_dense_replace", 0, MOST_LAYERS)
    if first >= fields.get("num_hidden_layers"):
        return None
    is_v3 = family == "deepseek_v3"
    method = "noaux_tc" if is_v3 else fields.get("topk_method")
    if not is_v3 and method not in (known := ("greedy", "group_limited_greedy")):
        raise ValueError(f"its topk_method is {method[:60]!r}; known here are {', '.join(known)}")
    experts, hidden = fields.get("n_routed_experts"), fields.get("moe_intermediate_size")
    groups = 1 if method == "greedy" else fields.whole("n_group", 1, experts)
    if experts % groups:
        raise ValueError(f"its {experts} experts do not go evenly into {groups} groups")
    return Routing(
        num_experts=experts,
        experts_per_token=fields.whole("num_experts_per_tok", 1, experts),
        hidden_features=hidden,
        normalise=is_v3 and fields.flag("norm_topk_prob", True),
        shared_features=hidden * fields.get("n_shared_experts"),
        dense_layers=tuple(range(first)),
        scoring="sigmoid" if is_v3 else "softmax",
        has_bias=is_v3,
        num_groups=groups,
        groups_per_token=groups if groups == 1 else fields.whole("topk_group", 1, groups),
        scaling=fields.get("routed_scaling_factor"),
    )


def _routing_without_groups(fields: Fields, family: str) -> Routing | None:
    """The experts of Qwen3-MoE and Mixtral. In Qwen3-MoE, some layers may have an MLP instead."""
    num_layers, num_experts = fields.get("num_hidden_layers"), fields.get("num_local_experts")
    is_qwen = family == "qwen3_moe"
    dense: tuple[int, ...] = ()
    if is_qwen:
        step, named = fields.get("decoder_sparse_step"), fields.get("mlp_only_layers")
        dense = tuple(i for i in range(num_layers) if i in named or (i + 1) % step)
    if len(dense) == num_layers:
        return None
    return Routing(
        num_experts=num_experts,
        experts_per_token=fields.whole("num_experts_per_tok", 1, num_experts),
        hidden_features=fields.get("moe_intermediate_size" if is_qwen else "intermediate_size"),
        normalise=fields.flag("norm_topk_prob", False) if is_qwen else True,
        dense_layers=dense,
    )


def _windows(fields: Fields, family: str) -> tuple[int | None, ...] | None:
    """Sliding window of each layer. None: no layer has one."""
    num_layers = fields.get("num_hidden_layers")
    if family in ("mistral", "mixtral", "qwen3_moe"):  # all layers are of one kind
        window = fields.get("sliding_window", None)
        return None if window is None else (window,) * num_layers
    kinds = fields.get("layer_types", ())
    if "sliding_attention" not in kinds:
        return None
    window = fields.get("sliding_window")
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)


Frequencies = tuple[float, ...]


def _rotary(fields: Fields, head_dim: int) -> tuple[Frequencies, Frequencies | None, float, int]:
    """The rotary frequencies, those for layers with a window if they differ, the factor of q and k, and the context."""
    ropes = Fields(fields.get("rope_parameters")).values
    rope = Fields(ropes.get("full_attention", ropes))
    context = fields.get("max_position_embeddings")
    frequencies, factor = scaled_frequencies(rope, head_dim, context)
    if rope.get("rope_type") == "yarn":
        extended = int(rope.get("original_max_position_embeddings") * rope.get("factor"))
        context = Fields({"original_max_position_embeddings * factor": extended}).whole(
            "original_max_position_embeddings * factor", 1, MOST_TOKENS
        )
    if "sliding_attention" not in ropes:
        return frequencies, None, factor, context
    of_windows, their_factor = scaled_frequencies(Fields(ropes["sliding_attention"]), head_dim, context)
    if factor != their_factor:
        raise ValueError(
            f"its rotary embedding has the factor {factor:g}, with windows {their_factor:g}; known here is 1"
        )
    return frequencies, of_windows, factor, context


def scaled_frequencies(rope: Fields, head_dim: int, context: int) -> tuple[Frequencies, float]:
    """The rotary frequencies, and the factor of q and k."""
    kind = rope.get("rope_type")
    if rope.get("type", kind) != kind:
        raise ValueError(f"its rope_type is {kind!r} and the type next to it {rope.get('type')!r}; delete one of them")
    scaling = rope.values
    if kind == "dynamic":  # applies only past the context, which is the limit here
        scaling = scaling | {"original_max_position_embeddings": context}
    frequencies = jaxpaged.rotary_frequencies(head_dim, scaling=scaling, max_length=context)
    return frequencies, jaxpaged.rotary_attention_factor(scaling)
