"""Reads LoRA adapters in PEFT's format and applies them to the layers of llama.py."""

import re
from collections.abc import Sequence
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
from lib.llama_config import LlamaConfig, parts_of

# Fields of a config that change results, with the values of plain LoRA. Other values of init_lora_weights change the
# model's own weights.
PLAIN = {
    "peft_type": ("LORA",),
    "task_type": ("CAUSAL_LM",),
    "bias": ("none",),
    "init_lora_weights": (True, "gaussian", "orthogonal", "eva"),
}
# Fields that may have any value: they are read here, are already part of the tensors, or have no effect. Any other
# field is refused by name unless it is null, false or empty.
READ = "r", "lora_alpha", "rank_pattern", "alpha_pattern", "use_rslora"
TARGETS = "target_modules", "exclude_modules", "layers_to_transform", "layers_pattern", "ensure_weight_tying"
TRAINING = "lora_dropout", "inference_mode", "eva_config", "corda_config", "loftq_config", "lora_ga_config"
ORIGIN = "base_model_name_or_path", "revision", "auto_mapping", "peft_version", "megatron_config", "megatron_core"
KNOWN = {*READ, *TARGETS, *TRAINING, *ORIGIN, "velora_config", "qalora_group_size"}
NAME = r"base_model\.model\.(.+)\.lora_([AB])\.weight"
MOST_RANK, MOST_ALPHA = 4096, 1e9

# The modules of a layer, and the projections in them that adapters can change.
LINEARS = ("self_attn", "qkv_proj"), ("self_attn", "o_proj"), ("mlp", "gate_up_proj"), ("mlp", "down_proj")

Factors = dict[str, tuple[np.ndarray, np.ndarray]]  # by the layer's name: [rank, features], [rank, outputs]


def read_adapter(folder: Path) -> Factors:
    """Reads an adapter's factors by layer name. The scaling is part of the second factor. Raises `CheckpointError`."""
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
    """A layer's rank and scale. As in PEFT, the first pattern that matches the end of its name overrides them."""

    def pattern(name: str) -> Fields:
        patterns = Fields(config.get(name, {}))
        key = next((key for key in patterns.values if re.match(rf"(.*\.)?({key})$", layer)), None)
        return Fields({} if key is None else {name: patterns.get(key)})

    rank = pattern("rank_pattern").whole("rank_pattern", 1, MOST_RANK, config.whole("r", 1, MOST_RANK))
    alpha = pattern("alpha_pattern").real("alpha_pattern", 0, MOST_ALPHA, config.real("lora_alpha", 0, MOST_ALPHA))
    return rank, alpha / (rank**0.5 if config.flag("use_rslora", False) else rank)


class AdaptedLinear(nnx.Module):
    """A linear layer with adapters for its parts. Each token uses one adapter or none.

    `ids`, int32 `[tokens]`, is set before each call: the adapter of each token, -1 for none.
    """

    def __init__(self, linear: Any, parts: dict[str, int], *, num_slots: int, rank: int, dtype: DTypeLike):
        def zeros(width: int) -> nnx.Param:  # in the layout of `jaxpaged.lora`
            return nnx.Param(jnp.zeros((num_slots, rank, width), dtype))

        self.linear, self.names = linear, tuple(parts)
        self.a = nnx.List([zeros(_shape(linear)[0]) for _ in parts])
        self.b = nnx.List([zeros(outputs) for outputs in parts.values()])
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
    """Wraps the layers that any of the adapters changes. Raises `CheckpointError`.

    `num_empty` adds slots of rank `most_rank`, which `replace_adapter` fills later; every layer is then wrapped.
    """
    adapted = {name for factors in adapters for name in factors}
    ranks = [len(a) for factors in adapters for a, _ in factors.values()]
    sizes: dict[str, Any] = dict(num_slots=len(adapters) + num_empty, rank=max([most_rank, *ranks]), dtype=dtype)
    for i, layer in enumerate(model.layers):
        for owner_name, name in LINEARS:
            owner = getattr(layer, owner_name)
            if (linear := getattr(owner, name, None)) is None:
                continue
            parts = parts_of(name, _shape(linear)[1], config)
            parts = {f"layers.{i}.{owner_name}.{part}": outputs for part, outputs in parts.items()}
            if num_empty or adapted & parts.keys():
                setattr(owner, name, AdaptedLinear(linear, parts, **sizes))
    for slot, factors in enumerate(adapters):
        replace_adapter(model, slot, factors)


def _shape(linear: Any) -> tuple[int, ...]:
    """[in, out]"""
    return linear.kernel.shape if isinstance(linear, nnx.Linear) else linear.weight.shape[::-1]


def replace_adapter(model: Llama, slot: int, factors: Factors) -> nnx.State:
    """Writes another adapter to a slot of the model. Returns the model's weights. Raises `CheckpointError`."""
    left, changed = dict(factors), []
    for module in _adapted(model):
        for name, *params in zip(module.names, module.a, module.b, strict=True):
            pair = left.pop(name, None)
            for i, param in enumerate(params):
                _, rank, width = param.shape
                rows = np.zeros((rank, width), np.float32)  # where the adapter has less
                if pair is not None:
                    _check_fits(name, pair[i], rank, width)
                    rows[: len(pair[i])] = pair[i]
                changed.append((param, param[...].at[slot].set(jnp.asarray(rows, param.dtype))))
    if left:
        raise CheckpointError(f"An adapter adapts {min(left)}, which this model does not have or cannot adapt here.")
    for param, value in changed:
        param.set_value(value)
    return nnx.state(model)


def _check_fits(name: str, factor: np.ndarray, rank: int, width: int) -> None:
    if factor.shape[1] != width:
        raise CheckpointError(f"An adapter's {name} has {factor.shape[1]} numbers a row, not {width}.")
    if len(factor) > rank:
        raise CheckpointError(f"An adapter's {name} has rank {len(factor)}; --max-adapter-rank is {rank}.")


def set_adapters(model: Llama, ids: jax.Array) -> None:
    """Sets the adapter of each token for the next call."""
    for module in _adapted(model):
        module.ids = ids


def _adapted(model: Llama) -> list[AdaptedLinear]:
    return [module for _, module in nnx.iter_modules(model) if isinstance(module, AdaptedLinear)]
