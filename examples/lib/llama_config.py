"""Configuration of a model in llama.py: its sizes, and the options of its family."""

import dataclasses
from typing import Any, Literal


@dataclasses.dataclass(frozen=True)
class LatentConfig:
    """Multi-head latent attention, with DeepSeek's names. The model's `head_dim` is qk_nope_head_dim."""

    kv_lora_rank: int
    qk_rope_head_dim: int
    v_head_dim: int
    q_lora_rank: int | None  # None: q is not compressed
    rotary_factor: float
    interleaved: bool


@dataclasses.dataclass(frozen=True)
class Routing:
    """The mixture of experts of DeepSeek, Qwen3-MoE and Mixtral."""

    num_experts: int
    experts_per_token: int
    hidden_features: int  # in each expert
    normalise: bool  # whether the shares of a token add up to `scaling`
    shared_features: int = 0  # hidden features of all shared experts together
    dense_layers: tuple[int, ...] = ()  # layers with an MLP instead
    scoring: Literal["softmax", "sigmoid"] = "softmax"
    has_bias: bool = False  # whether a bias is added to the scores for the selection, but not to the shares
    num_groups: int = 1  # groups of experts; a token uses only the best `groups_per_token` groups
    groups_per_token: int = 1
    scaling: float = 1.0


@dataclasses.dataclass(frozen=True)
class Clipped:
    """gpt-oss's experts: with biases, interleaved gate and up columns, and clipping of both."""

    alpha: float
    limit: float


@dataclasses.dataclass(frozen=True)
class LlamaConfig:
    """Sizes and options of a model. The defaults are Llama's; `families.py` sets the options of other families."""

    vocab_size: int
    context: int  # maximum tokens of a sequence, prompt and completion
    features: int
    hidden_features: int  # in the MLP, or in each expert
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    norm_epsilon: float
    rotary_frequencies: tuple[float, ...]
    attention_bias: bool = False  # for q, k and v
    output_bias: bool = False  # in the output projection of attention
    mlp_bias: bool = False
    tie_embeddings: bool = True
    windows: tuple[int | None, ...] | None = None  # each layer's sliding window in tokens; None: no layer has one
    window_frequencies: tuple[float, ...] | None = None  # rotary, of layers with a window; None: as in the others
    scale: float | None = None  # the factor of attention's logits; None: head_dim ** -0.5
    logits_soft_cap: float | None = None  # for attention's logits
    final_soft_cap: float | None = None  # for the model's logits
    use_sinks: bool = False
    use_qk_norm: bool = False  # a norm for each head of q and k
    use_post_norms: bool = False  # norms after attention and the MLP, as well as before them
    norm_plus_one: bool = False  # whether a norm multiplies by its weight + 1
    activation: Literal["silu", "gelu"] = "silu"  # "gelu" is the approximation with tanh
    embedding_scale: float = 1.0
    num_experts: int = 0  # 0: an MLP
    experts_per_token: int = 0
    clipped: Clipped | None = None  # gpt-oss's experts
    latent: LatentConfig | None = None  # DeepSeek's attention
    routing: Routing | None = None  # the experts of other families
    grouped_above: int | None = None  # tokens of a step above which products are grouped by expert; see experts.py
    axis: str | None = None  # the mesh axis, if the model is one device's shard

    @property
    def cache_sizes(self) -> dict[str, Any]:
        """Sizes of a layer's cache, as arguments of `jaxpaged.KVCache.create`."""
        if self.latent is None:
            return dict(num_kv_heads=self.num_kv_heads, head_dim=self.head_dim)
        width = self.latent.kv_lora_rank + self.latent.qk_rope_head_dim
        return dict(num_kv_heads=1, head_dim=width, value_dim=self.latent.kv_lora_rank, is_latent=True)


def parts_of(name: str, outputs: int, config: LlamaConfig) -> dict[str, int]:
    """Output widths by checkpoint name: of each projection that a fused module combines, or of the module itself."""
    if name == "qkv_proj":
        of_kv = config.num_kv_heads * config.head_dim
        return {"q_proj": outputs - 2 * of_kv, "k_proj": of_kv, "v_proj": of_kv}
    return dict.fromkeys(("gate_proj", "up_proj"), outputs // 2) if name == "gate_up_proj" else {name: outputs}
