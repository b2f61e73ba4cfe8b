"""Tiny random checkpoints in Hugging Face format for the families of examples/lib/families.py, in two forms: as
published, and as saved by transformers 5.

`tools/transformers_values.py` runs them in transformers, stores the results in data/families.json, and compares the
second form with files that transformers saves.
"""

from pathlib import Path

from transformers import AutoConfig, GenerationConfig, PreTrainedTokenizerFast

from tests.examples.tiny_checkpoint import write_folder

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
    head_dim=ROTARY,  # transformers saves this value
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
VISION = 16
FAMILIES = {
    "llama": dict(rope_theta=500.0, rope_scaling=LLAMA3, tie_word_embeddings=True),
    "mistral": dict(sliding_window=WINDOW, rope_theta=500.0),
    "mixtral": dict(sliding_window=WINDOW, rope_theta=500.0, num_local_experts=EXPERTS, num_experts_per_tok=2),
    "qwen2": dict(use_sliding_window=True, sliding_window=WINDOW, max_window_layers=1, rope_theta=500.0),
    "qwen3": dict(rope_theta=500.0, rope_scaling=YARN),
    # An MLP in the first layer, experts in the second one.
    "qwen3_moe": dict(
        rope_theta=500.0,
        num_experts=ROUTED,
        num_experts_per_tok=3,
        moe_intermediate_size=20,
        decoder_sparse_step=2,
        norm_topk_prob=True,
    ),
    "gemma2": GEMMA | dict(attn_logit_softcapping=2.0, final_logit_softcapping=3.0),
    "gemma3_text": GEMMA
    | dict(
        sliding_window_pattern=2,
        rope_theta=500.0,
        rope_local_base_freq=20.0,
        rope_scaling=dict(rope_type="linear", factor=8.0),
    ),
    # Reads images too. The sizes of its language model are in a nested config.
    "gemma3": dict(
        vision_config=dict(
            hidden_size=VISION,
            intermediate_size=VISION,
            num_hidden_layers=1,
            num_attention_heads=2,
            image_size=28,
            patch_size=14,
        ),
        mm_tokens_per_image=4,
        image_token_index=297,
        boi_token_index=296,
        eoi_token_index=295,
    ),
    "gpt_oss": dict(
        sliding_window=WINDOW,
        rope_theta=500.0,
        rope_scaling=YARN,
        num_local_experts=EXPERTS,
        num_experts_per_tok=2,
        swiglu_limit=1.0,
    ),
    # A dense layer and one with experts. YaRN with factors for rotated numbers and for all logits.
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


def make_config(family: str, **changes) -> dict:
    """The config.json of a published checkpoint."""
    if family == "gemma3":
        text = {name: value for name, value in SIZES.items() if name != "eos_token_id"} | FAMILIES["gemma3_text"]
        fields = {"text_config": text, "eos_token_id": SIZES["eos_token_id"], **FAMILIES[family]}
    else:
        fields = {**SIZES, **FAMILIES[family]}
    return {"model_type": family, **fields, **changes}


def write_family(folder: Path, family: str, **changes) -> None:
    """Writes config.json, model.safetensors, and the tokenizer of tiny_checkpoint.py."""
    config = make_config(family, **changes)
    write_folder(folder, config, _shapes(family, config), 2)


def save_family(folder: Path, family: str) -> None:
    """Writes the model in the form of transformers 5. Tensors keep their names and layouts."""
    write_family(folder, family)
    config = AutoConfig.from_pretrained(folder, local_files_only=True)
    kind = "ForConditionalGeneration" if family == "gemma3" else "ForCausalLM"
    config.architectures = [type(config).__name__.removesuffix("Config").removesuffix("Text") + kind]
    for part in (config, *(getattr(config, name) for name in config.sub_configs)):
        part.dtype = "float32"
    config.save_pretrained(folder)
    GenerationConfig.from_model_config(config).save_pretrained(folder)
    PreTrainedTokenizerFast.from_pretrained(folder, local_files_only=True).save_pretrained(folder)


def _shapes(family: str, config: dict) -> dict[str, tuple[int, ...]]:
    if family == "gemma3":
        text = {f"language_model.{name}": shape for name, shape in _shapes("gemma3_text", config).items()}
        return text | _vision_shapes()
    shapes = {"model.embed_tokens.weight": (VOCAB, FEATURES), "model.norm.weight": (FEATURES,)}
    if not config.get("tie_word_embeddings", family.startswith("gemma")):
        shapes["lm_head.weight"] = (VOCAB, FEATURES)
    for i in range(config.get("num_hidden_layers", LAYERS)):
        of_layer = _deepseek_shapes(family, config, i) if family.startswith("deepseek") else _layer_shapes(family, i)
        shapes |= {f"model.layers.{i}.{name}": shape for name, shape in of_layer.items()}
    return shapes


def _vision_shapes() -> dict[str, tuple[int, ...]]:
    layer, attention = "encoder.layers.0", "head.attention"
    linears = [f"{layer}.self_attn.{name}" for name in ("q_proj", "k_proj", "v_proj", "out_proj")]
    linears += [f"{mlp}.{name}" for mlp in (f"{layer}.mlp", "head.mlp") for name in ("fc1", "fc2")]
    linears.append(f"{attention}.out_proj")
    norms = [f"{layer}.layer_norm1", f"{layer}.layer_norm2", "post_layernorm", "head.layernorm"]
    tower: dict[str, tuple[int, ...]] = {
        "embeddings.patch_embedding.weight": (VISION, 3, 14, 14),
        "embeddings.position_embedding.weight": (4, VISION),
        "head.probe": (1, 1, VISION),
        f"{attention}.in_proj_weight": (3 * VISION, VISION),
        f"{attention}.in_proj_bias": (3 * VISION,),
    }
    tower |= {f"{name}.weight": (VISION, VISION) for name in linears} | {f"{name}.weight": (VISION,) for name in norms}
    tower |= {f"{name}.bias": (VISION,) for name in (*linears, *norms, "embeddings.patch_embedding")}
    return {f"vision_tower.{name}": shape for name, shape in tower.items()} | {
        "multi_modal_projector.mm_input_projection_weight": (VISION, FEATURES),
        "multi_modal_projector.mm_soft_emb_norm.weight": (VISION,),
    }


def _mlp(name: str, width: int) -> dict[str, tuple[int, ...]]:
    up = {f"{name}.{part}_proj.weight": (width, FEATURES) for part in ("gate", "up")}
    return up | {f"{name}.down_proj.weight": (FEATURES, width)}


def _deepseek_shapes(family: str, config: dict, i: int) -> dict[str, tuple[int, ...]]:
    queries, rank, hidden = HEADS * (PLAIN + ROTARY), config["q_lora_rank"], config["moe_intermediate_size"]

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
        return shapes | _mlp("mlp", HIDDEN)
    shapes["mlp.gate.weight"] = (ROUTED, FEATURES)
    if family == "deepseek_v3":
        shapes["mlp.gate.e_score_correction_bias"] = (ROUTED,)
    for expert in range(ROUTED):
        shapes |= _mlp(f"mlp.experts.{expert}", hidden)
    return shapes | _mlp("mlp.shared_experts", hidden * config["n_shared_experts"])


def _layer_shapes(family: str, i: int) -> dict[str, tuple[int, ...]]:
    outputs = {"q": HEADS * HEAD_DIM, "k": KV_HEADS * HEAD_DIM, "v": KV_HEADS * HEAD_DIM}
    shapes: dict[str, tuple[int, ...]] = {f"self_attn.{x}_proj.weight": (n, FEATURES) for x, n in outputs.items()}
    shapes["self_attn.o_proj.weight"] = (FEATURES, HEADS * HEAD_DIM)
    if family in ("qwen2", "gpt_oss"):
        shapes |= {f"self_attn.{x}_proj.bias": (n,) for x, n in outputs.items()}
    if family in ("qwen3", "qwen3_moe", "gemma3_text"):
        shapes |= {f"self_attn.{x}_norm.weight": (HEAD_DIM,) for x in "qk"}
    norms = ["input_layernorm", "post_attention_layernorm"]
    if family.startswith("gemma"):
        norms += ["pre_feedforward_layernorm", "post_feedforward_layernorm"]
    shapes |= {f"{norm}.weight": (FEATURES,) for norm in norms}
    if family == "mixtral":
        experts = [f"block_sparse_moe.experts.{expert}" for expert in range(EXPERTS)]
        shapes |= {f"{expert}.{part}.weight": (HIDDEN, FEATURES) for expert in experts for part in ("w1", "w3")}
        shapes |= {f"{expert}.w2.weight": (FEATURES, HIDDEN) for expert in experts}
        return shapes | {"block_sparse_moe.gate.weight": (EXPERTS, FEATURES)}
    if family == "qwen3_moe" and i == 1:
        for expert in range(ROUTED):
            shapes |= _mlp(f"mlp.experts.{expert}", 20)
        return shapes | {"mlp.gate.weight": (ROUTED, FEATURES)}
    if family != "gpt_oss":
        return shapes | _mlp("mlp", HIDDEN)
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
