"""Tiny random checkpoints in Hugging Face form of the families of examples/lib/families.py.

`tools/transformers_values.py` runs them in transformers and stores what it finds in data/families.json.
"""

import json
from pathlib import Path

import numpy as np
import safetensors.numpy

from tests.examples.tiny_checkpoint import write_tokenizer

VOCAB, FEATURES, HIDDEN, LAYERS, HEADS, KV_HEADS, HEAD_DIM, EXPERTS = 300, 32, 48, 2, 4, 2, 8, 4
WINDOW = 6
PROMPT = [104, 7, 33, 250, 33, 1, 91, 12, 180, 66]
SIZES = dict(
    vocab_size=VOCAB,
    max_position_embeddings=64,
    hidden_size=FEATURES,
    intermediate_size=HIDDEN,
    num_hidden_layers=LAYERS,
    num_attention_heads=HEADS,
    num_key_value_heads=KV_HEADS,
    head_dim=HEAD_DIM,
    rms_norm_eps=1e-5,
    eos_token_id=299,
)
LLAMA3 = dict(
    rope_type="llama3",
    factor=8.0,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
    original_max_position_embeddings=32,
)
YARN = dict(rope_type="yarn", factor=4.0, truncate=False, beta_fast=8.0, original_max_position_embeddings=16)
GEMMA = dict(hidden_activation="gelu_pytorch_tanh", query_pre_attn_scalar=12, sliding_window=WINDOW)
LATENT, PLAIN, ROTARY, VALUE, ROUTED = 16, 8, 4, 6, 8
DEEPSEEK = dict(
    head_dim=ROTARY,  # as transformers saves it
    num_key_value_heads=HEADS,
    q_lora_rank=None,
    kv_lora_rank=LATENT,
    qk_nope_head_dim=PLAIN,
    qk_rope_head_dim=ROTARY,
    v_head_dim=VALUE,
    first_k_dense_replace=1,
    moe_intermediate_size=20,
    n_routed_experts=ROUTED,
    num_experts_per_tok=2,
    n_group=4,
    topk_group=1,
    routed_scaling_factor=1.5,
    rope_theta=500.0,
)
DEEPSEEK_YARN = dict(type="yarn", factor=4.0, beta_fast=8.0, original_max_position_embeddings=16)
FAMILIES = {
    "llama": dict(rope_theta=500.0, rope_scaling=LLAMA3, tie_word_embeddings=True),
    "mistral": dict(sliding_window=WINDOW, rope_theta=500.0),
    "qwen2": dict(use_sliding_window=True, sliding_window=WINDOW, max_window_layers=1, rope_theta=500.0),
    "qwen3": dict(rope_theta=500.0, rope_scaling=YARN),
    "gemma2": GEMMA | dict(attn_logit_softcapping=2.0, final_logit_softcapping=3.0),
    "gemma3_text": GEMMA
    | dict(
        sliding_window_pattern=2,
        rope_theta=500.0,
        rope_local_base_freq=20.0,
        rope_scaling=dict(rope_type="linear", factor=8.0),
    ),
    "gpt_oss": dict(
        sliding_window=WINDOW,
        rope_theta=500.0,
        rope_scaling=YARN,
        num_local_experts=EXPERTS,
        num_experts_per_tok=2,
        swiglu_limit=1.0,
    ),
    # A dense layer and one with experts. YaRN with factors of what is rotated and of all logits.
    "deepseek_v2": DEEPSEEK
    | dict(
        topk_method="group_limited_greedy",
        n_shared_experts=2,
        rope_scaling=DEEPSEEK_YARN | dict(mscale=0.9, mscale_all_dim=0.5),
    ),
    "deepseek_v3": DEEPSEEK
    | dict(
        q_lora_rank=12,
        n_shared_experts=1,
        num_nextn_predict_layers=1,
        rope_scaling=DEEPSEEK_YARN | dict(mscale=1.0, mscale_all_dim=1.0),
    ),
}


def write_family(folder: Path, family: str, **changes) -> None:
    """Writes config.json, model.safetensors, and the tokenizer of tiny_checkpoint.py."""
    folder.mkdir(exist_ok=True)
    config = {"model_type": family, **SIZES, **FAMILIES[family], **changes}
    (folder / "config.json").write_text(json.dumps(config))
    rng = np.random.default_rng(2)
    tensors = {
        name: (rng.normal(size=shape) * (0.25 if len(shape) > 1 else 1)).astype(np.float32)
        for name, shape in _shapes(family, config).items()
    }
    safetensors.numpy.save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    write_tokenizer(folder)


def _shapes(family: str, config: dict) -> dict[str, tuple[int, ...]]:
    shapes = {"model.embed_tokens.weight": (VOCAB, FEATURES), "model.norm.weight": (FEATURES,)}
    if not config.get("tie_word_embeddings", family.startswith("gemma")):
        shapes["lm_head.weight"] = (VOCAB, FEATURES)
    for i in range(LAYERS):
        of_layer = _deepseek_shapes(family, config, i) if family.startswith("deepseek") else _layer_shapes(family)
        shapes |= {f"model.layers.{i}.{name}": shape for name, shape in of_layer.items()}
    return shapes


def _deepseek_shapes(family: str, config: dict, i: int) -> dict[str, tuple[int, ...]]:
    queries, rank, hidden = HEADS * (PLAIN + ROTARY), config["q_lora_rank"], config["moe_intermediate_size"]

    def mlp(name: str, width: int) -> dict[str, tuple[int, ...]]:
        up = {f"{name}.{part}_proj.weight": (width, FEATURES) for part in ("gate", "up")}
        return up | {f"{name}.down_proj.weight": (FEATURES, width)}

    shapes: dict[str, tuple[int, ...]] = {
        "input_layernorm.weight": (FEATURES,),
        "post_attention_layernorm.weight": (FEATURES,),
        "self_attn.kv_a_proj_with_mqa.weight": (LATENT + ROTARY, FEATURES),
        "self_attn.kv_a_layernorm.weight": (LATENT,),
        "self_attn.kv_b_proj.weight": (HEADS * (PLAIN + VALUE), LATENT),
        "self_attn.o_proj.weight": (FEATURES, HEADS * VALUE),
    }
    if rank is None:
        shapes["self_attn.q_proj.weight"] = (queries, FEATURES)
    else:
        shapes["self_attn.q_a_proj.weight"] = (rank, FEATURES)
        shapes["self_attn.q_a_layernorm.weight"] = (rank,)
        shapes["self_attn.q_b_proj.weight"] = (queries, rank)
    if i < config["first_k_dense_replace"]:
        return shapes | mlp("mlp", HIDDEN)
    shapes["mlp.gate.weight"] = (ROUTED, FEATURES)
    if family == "deepseek_v3":
        shapes["mlp.gate.e_score_correction_bias"] = (ROUTED,)
    for expert in range(ROUTED):
        shapes |= mlp(f"mlp.experts.{expert}", hidden)
    return shapes | mlp("mlp.shared_experts", hidden * config["n_shared_experts"])


def _layer_shapes(family: str) -> dict[str, tuple[int, ...]]:
    outputs = {"q": HEADS * HEAD_DIM, "k": KV_HEADS * HEAD_DIM, "v": KV_HEADS * HEAD_DIM}
    shapes: dict[str, tuple[int, ...]] = {f"self_attn.{x}_proj.weight": (n, FEATURES) for x, n in outputs.items()}
    shapes["self_attn.o_proj.weight"] = (FEATURES, HEADS * HEAD_DIM)
    if family in ("qwen2", "gpt_oss"):
        shapes |= {f"self_attn.{x}_proj.bias": (n,) for x, n in outputs.items()}
    if family in ("qwen3", "gemma3_text"):
        shapes |= {f"self_attn.{x}_norm.weight": (HEAD_DIM,) for x in "qk"}
    norms = ["input_layernorm", "post_attention_layernorm"]
    if family.startswith("gemma"):
        norms += ["pre_feedforward_layernorm", "post_feedforward_layernorm"]
    shapes |= {f"{norm}.weight": (FEATURES,) for norm in norms}
    if family != "gpt_oss":
        shapes |= {f"mlp.{name}_proj.weight": (HIDDEN, FEATURES) for name in ("gate", "up")}
        return shapes | {"mlp.down_proj.weight": (FEATURES, HIDDEN)}
    return shapes | {
        "self_attn.o_proj.bias": (FEATURES,),
        "self_attn.sinks": (HEADS,),
        "mlp.router.weight": (EXPERTS, FEATURES),
        "mlp.router.bias": (EXPERTS,),
        "mlp.experts.gate_up_proj": (EXPERTS, FEATURES, 2 * HIDDEN),
        "mlp.experts.gate_up_proj_bias": (EXPERTS, 2 * HIDDEN),
        "mlp.experts.down_proj": (EXPERTS, HIDDEN, FEATURES),
        "mlp.experts.down_proj_bias": (EXPERTS, FEATURES),
    }
