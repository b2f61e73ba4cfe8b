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
from lib.fields import read_json
from lib.llama import Llama
from lib.llama_config import LlamaConfig, fused_parts

# Fields of a config that would change results: only these values are taken.
ONLY = {
    "peft_type": "LORA",
    "bias": "none",
    "use_dora": False,
    "fan_in_fan_out": False,
    "modules_to_save": None,
    "rank_pattern": {},  # a rank is read from the tensors
    "alpha_pattern": {},
    "layer_replication": None,
    "lora_bias": False,
}
NAME = r"base_model\.model\.(?:model\.)?(.+)\.lora_([AB])\.weight"
MOST_RANK = 4096

Factors = dict[str, tuple[np.ndarray, np.ndarray]]  # of each layer: [rank, features], [rank, outputs]


def read_adapter(folder: Path) -> Factors:
    """The adapter's factors by the names of the layers, its scaling in the second. Raises `CheckpointError`."""
    from lib.weight_files import read_safetensors  # of the extra "examples"

    try:
        config, found = read_json(folder / "adapter_config.json"), {}
        for name, value in ONLY.items():
            if (given := config.get(name, value)) not in (value, {}):
                raise ValueError(f"its {name} is {str(given)[:60]}, which is not known here")
        rank, alpha = config.whole("r", 1, MOST_RANK), config.real("lora_alpha", 0, 1e9)
        scaling = alpha / (rank**0.5 if config.flag("use_rslora", False) else rank)
        for name, read in read_safetensors(folder / "adapter_model.safetensors").items():
            if (match := re.fullmatch(NAME, name)) is None:
                raise ValueError(f"it holds {name[:100]}, which is not known here")
            found[match[1], match[2]] = read().astype(np.float32)
        factors = {layer: (found[layer, "A"], found[layer, "B"].T * scaling) for layer, _ in found}
    except KeyError as error:
        raise CheckpointError(f"The adapter {folder} lacks {error}.") from error
    except READ_ERRORS as error:
        raise CheckpointError(f"{folder} cannot be read as an adapter: {one_line(error)}.") from error
    for layer, pair in factors.items():
        if any(x.ndim != 2 or len(x) != len(pair[0]) or not np.isfinite(x).all() for x in pair):
            raise CheckpointError(f"The adapter {folder} has factors of {layer} that do not fit or are not finite.")
    return factors


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


def adapt(model: Llama, config: LlamaConfig, adapters: Sequence[Factors], dtype: DTypeLike) -> None:
    """Puts the adapters beside the layers that any of them adapts. Raises `CheckpointError`."""
    left = {name for factors in adapters for name in factors}
    rank = max(len(a) for factors in adapters for a, _ in factors.values())
    fused = fused_parts(config)
    for prefix, owner, name in _linears(model):
        parts = {f"{prefix}.{part}": width for part, width in fused.get(name, {name: 0}).items()}
        if left.isdisjoint(parts):
            continue
        left -= set(parts)
        linear = getattr(owner, name)
        shape = linear.kernel.shape if isinstance(linear, nnx.Linear) else linear.weight.shape[::-1]
        factors = [_stacked(part, adapters, rank, shape[0], width or shape[1], dtype) for part, width in parts.items()]
        setattr(owner, name, AdaptedLinear(linear, factors))
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
