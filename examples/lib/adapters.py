"""Adapters (LoRA) in PEFT's form: read, stacked, and put beside the layers of llama.py that they adapt."""

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.typing import DTypeLike

import jaxpaged
from lib.checkpoint import READ_ERRORS, CheckpointError, one_line
from lib.fields import Fields, read_json
from lib.llama import Llama
from lib.llama_config import LlamaConfig, fused_parts

# Fields of a config that change results: only these values are plain LoRA. The other values of init_lora_weights start
# from changed weights of the model.
PLAIN = {
    "peft_type": ("LORA",),
    "task_type": ("CAUSAL_LM",),
    "bias": ("none",),
    "init_lora_weights": (True, "gaussian", "orthogonal", "eva"),
}
# Fields with any value: they are read here, their result is in the tensors, or they change none. Any other field is
# refused by name unless it is null, false or empty.
READ = "r", "lora_alpha", "rank_pattern", "alpha_pattern", "use_rslora"
TARGETS = "target_modules", "exclude_modules", "layers_to_transform", "layers_pattern", "ensure_weight_tying"
TRAINING = "lora_dropout", "inference_mode", "eva_config", "corda_config", "loftq_config", "lora_ga_config"
ORIGIN = "base_model_name_or_path", "revision", "auto_mapping", "peft_version", "megatron_config", "megatron_core"
KNOWN = {*READ, *TARGETS, *TRAINING, *ORIGIN, "velora_config", "qalora_group_size"}
NAME = r"base_model\.model\.(.+)\.lora_([AB])\.weight"
MOST_RANK, MOST_ALPHA = 4096, 1e9

Factors = dict[str, tuple[np.ndarray, np.ndarray]]  # of each layer: [rank, features], [rank, outputs]


def read_adapter(folder: Path) -> Factors:
    """The adapter's factors by the names of the layers, its scaling in the second. Raises `CheckpointError`."""
    from lib.weight_files import plain_name, read_safetensors  # extra "examples"

    try:
        config, found = read_json(folder / "adapter_config.json"), {}
        _check_plain(config)
        for name, read in read_safetensors(folder / "adapter_model.safetensors").items():
            if (match := re.fullmatch(NAME, name)) is None:
                raise ValueError(f"it holds {name[:100]}, which is not known here")
            found[match[1], match[2]] = read().astype(np.float32)
        factors = {}
        for layer in dict.fromkeys(layer for layer, _ in found):
            a, b = found[layer, "A"], found[layer, "B"]
            rank, scale = _scale(config, layer)
            if a.ndim != 2 or b.ndim != 2 or not len(a) == b.shape[1] == rank:
                raise ValueError(f"its {layer} has factors {a.shape} and {b.shape}; its config says rank {rank}")
            factors[plain_name(layer)] = a, b.T * scale
    except KeyError as error:
        raise CheckpointError(f"The adapter {folder} lacks {error}.") from error
    except (*READ_ERRORS, re.error) as error:
        raise CheckpointError(f"{folder} cannot be read as an adapter: {one_line(error)}.") from error
    for layer, pair in factors.items():
        if not all(np.isfinite(x).all() for x in pair):
            raise CheckpointError(f"The adapter {folder} has factors of {layer} that are not finite.")
    return factors


def _check_plain(config: Fields) -> None:
    for name, value in config.values.items():
        is_unset = value is None or value is False or value in ([], {})
        if not is_unset and name not in KNOWN and value not in PLAIN.get(name, ()):
            raise ValueError(f"its {name[:60]} is {str(value)[:60]}, which is not known here")


def _scale(config: Fields, layer: str) -> tuple[int, float]:
    """A layer's rank and scale. As in PEFT, a pattern's first key that matches the end of its name overrides them."""

    def pattern(name: str) -> Fields:
        patterns = Fields(config.get(name, {}))
        key = next((key for key in patterns.values if re.match(rf"(.*\.)?({key})$", layer)), None)
        return Fields({} if key is None else {name: patterns.get(key)})

    rank = pattern("rank_pattern").whole("rank_pattern", 1, MOST_RANK, config.whole("r", 1, MOST_RANK))
    alpha = pattern("alpha_pattern").real("alpha_pattern", 0, MOST_ALPHA, config.real("lora_alpha", 0, MOST_ALPHA))
    return rank, alpha / (rank**0.5 if config.flag("use_rslora", False) else rank)


class AdaptedLinear(nnx.Module):
    """A linear layer, and beside it the adapters of its parts, one of them for each token.

    `ids` are set before each use, int32 `[tokens]`; -1: no adapter.
    """

    def __init__(self, linear: Any, factors: list[tuple[jax.Array, jax.Array]]):
        self.linear = linear
        self.a = nnx.List([nnx.Param(a) for a, _ in factors])  # of each part, as `jaxpaged.lora` takes them
        self.b = nnx.List([nnx.Param(b) for _, b in factors])
        self.ids: jax.Array = nnx.data(jnp.full(0, -1, jnp.int32))

    def __call__(self, x: jax.Array, **options: Any) -> jax.Array:
        tokens = x.reshape(-1, x.shape[-1])
        parts = [jaxpaged.lora(tokens, a[...], b[...], self.ids) for a, b in zip(self.a, self.b, strict=True)]
        out = self.linear(x, **options)
        return out + jnp.concatenate(parts, axis=-1).reshape(out.shape)


def adapt(
    model: Llama,
    config: LlamaConfig,
    adapters: Sequence[Factors],
    dtype: DTypeLike,
    *,
    num_empty: int = 0,
    most_rank: int = 0,
) -> None:
    """Puts the adapters beside the layers that any of them adapts. Raises `CheckpointError`.

    With `num_empty` more slots of `most_rank`, which `replace_adapter` fills, every layer can be adapted.
    """
    left = {name for factors in adapters for name in factors}
    rank = max((len(a) for factors in adapters for a, _ in factors.values()), default=0)
    slots, rank = [*adapters, *[{}] * num_empty], max(rank, most_rank)
    fused = fused_parts(config)
    for prefix, owner, name in _linears(model):
        parts = {f"{prefix}.{part}": width for part, width in fused.get(name, {name: 0}).items()}
        if left.isdisjoint(parts) and not num_empty:
            continue
        left -= set(parts)
        linear = getattr(owner, name)
        shape = linear.kernel.shape if isinstance(linear, nnx.Linear) else linear.weight.shape[::-1]
        factors = [_stacked(part, slots, rank, shape[0], width or shape[1], dtype) for part, width in parts.items()]
        setattr(owner, name, AdaptedLinear(linear, factors))
    _check_known(left)


def replace_adapter(model: Llama, config: LlamaConfig, slot: int, factors: Factors) -> nnx.State:
    """The weights with another adapter in a slot; the model has them too. Raises `CheckpointError`."""
    left, fused = set(factors), fused_parts(config)
    changed: list[tuple[nnx.Param, jax.Array]] = []
    for prefix, owner, name in _linears(model):
        module = getattr(owner, name)
        for part, a, b in zip(fused.get(name, [name]), module.a, module.b, strict=True):
            full_name = f"{prefix}.{part}"
            left.discard(full_name)
            _, rank, features = a.shape
            pair = _stacked(full_name, [factors], rank, features, b.shape[2], a.dtype)
            changed += [(param, param[...].at[slot].set(rows[0])) for param, rows in zip((a, b), pair, strict=True)]
    _check_known(left)
    for param, value in changed:
        param.set_value(value)
    return nnx.state(model)


def _check_known(left: set[str]) -> None:
    if left:
        raise CheckpointError(f"An adapter adapts {min(left)}, which this model does not have or cannot adapt here.")


def _stacked(
    name: str, adapters: Sequence[Factors], rank: int, features: int, outputs: int, dtype: DTypeLike
) -> tuple[jax.Array, jax.Array]:
    """`[adapters, rank, features]` and `[adapters, rank, outputs]`, zeros where an adapter has less."""
    stacks = np.zeros((len(adapters), rank, features), np.float32), np.zeros((len(adapters), rank, outputs), np.float32)
    for i, factors in enumerate(adapters):
        for stack, factor in zip(stacks, factors.get(name, ()), strict=False):
            if factor.shape[1] != stack.shape[2]:
                raise CheckpointError(f"An adapter's {name} has {factor.shape[1]} numbers a row, not {stack.shape[2]}.")
            if len(factor) > rank:
                raise CheckpointError(f"An adapter's {name} has rank {len(factor)}; --max-adapter-rank is {rank}.")
            stack[i, : len(factor)] = factor
    return jnp.asarray(stacks[0], dtype), jnp.asarray(stacks[1], dtype)


def set_adapters(model: Llama, ids: jax.Array) -> None:
    """Which adapter each token of the next call takes."""
    for _, owner, name in _linears(model):
        if isinstance(module := getattr(owner, name), AdaptedLinear):
            module.ids = ids


def _linears(model: Llama) -> Iterator[tuple[str, Any, str]]:
    """What may be adapted: the name of the module that holds it, that module, and its name there."""
    for i, layer in enumerate(model.layers):
        for prefix, owner in ((f"layers.{i}.self_attn", layer.self_attn), (f"layers.{i}.mlp", layer.mlp)):
            for name in ("qkv_proj", "o_proj", "gate_up_proj", "down_proj"):
                if hasattr(owner, name):
                    yield prefix, owner, name
