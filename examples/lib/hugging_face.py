"""Reads a checkpoint in Hugging Face format, of any family in families.py."""

import dataclasses
import functools
import re
from collections.abc import Callable
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import tokenizers
from transformers import AutoConfig, AutoTokenizer, PreTrainedTokenizerFast

from lib.checkpoint import Checkpoint, CheckpointError, one_line
from lib.families import read_config
from lib.fields import MOST_LAYERS, Fields, read_json
from lib.generation_config import eos_ids, read_generation_config, sampling_defaults
from lib.llama_config import LlamaConfig
from lib.tokenizer import Tokenizer
from lib.weight_files import Tensors, plain_name, read_weights

MIXTRAL_PARTS = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}


def read_folder(folder: Path) -> Checkpoint:
    for name in ("config.json", "tokenizer.json"):
        if not (folder / name).is_file():
            raise CheckpointError(f"{folder} holds no {name}.")
    fields = read_json(folder / "config.json")
    tensors = _plain_names(read_weights(folder))
    config = read_config(fields)
    _rearrange(tensors, config, fields)
    if config.tie_embeddings and not _is_tied(tensors):
        config = dataclasses.replace(config, tie_embeddings=False)
    # Layers after the last one are for drafting tokens.
    drafting = range(fields.whole("num_nextn_predict_layers", 0, MOST_LAYERS, 0))
    behind = tuple(f"layers.{config.num_layers + i}." for i in drafting)
    tensors = {name: read for name, read in tensors.items() if not name.startswith(behind)}
    generation = read_generation_config(folder)
    return Checkpoint(config, _folder_tokenizer(folder, fields, generation), tensors, sampling_defaults(generation))


def _plain_names(tensors: Tensors) -> Tensors:
    """The tensors, with the names of llama.py."""
    plain: Tensors = {}
    for name, read in tensors.items():
        short = _as_in_other_families(plain_name(name))
        if short in plain:
            raise ValueError(f"it holds {short[:100]} twice, once as {name[:100]}")
        plain[short] = read
    return plain


def _as_in_other_families(name: str) -> str:
    """Mixtral's block_sparse_moe is the mlp of other families, and its experts have parts w1, w2 and w3."""
    name = name.replace(".block_sparse_moe.", ".mlp.")
    return re.sub(r"(?<=\d\.)w[123](?=\.weight)", lambda match: MIXTRAL_PARTS[match[0]], name)


def _is_tied(tensors: Tensors) -> bool:
    """False if the checkpoint has a head that differs from the embeddings. As in transformers, it is then used."""
    head = tensors.get("lm_head.weight")
    return head is None or np.array_equal(head(), tensors["embed_tokens.weight"]())


def _rearrange(tensors: Tensors, config: LlamaConfig, fields: Fields) -> None:
    """Adds tensors of llama.py that a checkpoint stores in another format. Each is computed when it is read."""

    def add(suffix: str, compute: Callable[..., np.ndarray], *inputs: str) -> None:
        """Adds tensors whose names end in `suffix`, computed from those whose names end in `inputs`."""
        for name in [name for name in tensors if name.endswith(inputs[0])]:
            stem = name.removesuffix(inputs[0])
            tensors[stem + suffix] = functools.partial(_compute, compute, [tensors[stem + each] for each in inputs])

    block = Fields(fields.get("quantization_config", {})).get("weight_block_size", [128, 128])
    add("", _unpack_mxfp4, "_blocks", "_scales")
    add(".weight", functools.partial(_widen_float8, block=block), ".weight_scale_inv", ".weight")
    add(".experts.gate_up_proj", _transpose, ".experts.gate_up_proj")
    _stack_experts(tensors)
    for i, part in enumerate(("k", "v")):
        part_weight = functools.partial(_kv_b_part, config=config, part=i)
        add(f".{part}_b_proj.weight", part_weight, ".kv_b_proj.weight")


def _compute(compute: Callable[..., np.ndarray], inputs: list[Callable[[], np.ndarray]]) -> np.ndarray:
    return compute(*(read() for read in inputs))


def _unpack_mxfp4(blocks: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """Widens experts from MXFP4, 4-bit numbers with one exponent per 32 of them, to float32 [experts, in, out].

    The blocks are uint8 [experts, out, in / 32, 16], with the first number in the lower bits of each byte. The scales
    are uint8 [experts, out, in / 32].
    """
    numbers = np.stack([blocks & 15, blocks >> 4], axis=-1).view(jnp.float4_e2m1fn).astype(np.float32)
    numbers = numbers.reshape(*scales.shape, 32) * scales.view(jnp.float8_e8m0fnu).astype(np.float32)[..., None]
    return numbers.reshape(*scales.shape[:2], -1).swapaxes(1, 2)


def _widen_float8(factors: np.ndarray, weight: np.ndarray, *, block: list[int]) -> np.ndarray:
    """Widens a weight [out, in] from float8 with one factor per block to float32. The last blocks may be partial."""
    rows, columns = (np.arange(size) // of_block for size, of_block in zip(weight.shape, block, strict=True))
    return weight.astype(np.float32) * factors.astype(np.float32)[rows[:, None], columns]


def _transpose(experts: np.ndarray) -> np.ndarray:
    return experts.swapaxes(1, 2)


def _stack_experts(tensors: Tensors) -> None:
    """Adds [experts, hidden features, features] for experts that a checkpoint stores separately, gate before up."""
    counts: dict[str, int] = {}
    for name in tensors:
        if match := re.fullmatch(r"(.+\.experts)\.(\d{1,5})\.down_proj\.weight", name):
            counts[match[1]] = max(counts.get(match[1], 0), int(match[2]) + 1)
    for stem, count in counts.items():
        read = functools.partial(_stacked, tensors, stem, count)
        tensors[f"{stem}.gate_up_proj"] = functools.partial(read, "gate_proj", "up_proj")
        tensors[f"{stem}.down_proj"] = functools.partial(_compute, _transpose, [functools.partial(read, "down_proj")])


def _stacked(tensors: Tensors, stem: str, count: int, *parts: str) -> np.ndarray:
    names = [[f"{stem}.{i}.{part}.weight" for part in parts] for i in range(count)]
    return np.stack([np.concatenate([tensors[name]() for name in of_expert]) for of_expert in names])


def _kv_b_part(both: np.ndarray, *, config: LlamaConfig, part: int) -> np.ndarray:
    """The projection to keys (part 0) or values (part 1), which a checkpoint stores in one tensor, head by head."""
    by_head = both.reshape(config.num_heads, -1, both.shape[-1])
    return np.split(by_head, [config.head_dim], axis=1)[part].reshape(-1, both.shape[-1])


def _folder_tokenizer(folder: Path, config: Fields, generation: Fields) -> Tokenizer:
    # The tokenizer's class also depends on these fields of the config, which is already checked.
    family = AutoConfig.for_model(config.text("model_type"), tokenizer_class=config.get("tokenizer_class", None))
    try:
        loaded = AutoTokenizer.from_pretrained(folder, config=family, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # tokenizers raises plain Exception
        message = f"{type(error).__name__}: {one_line(error)[:300]}"
        raise CheckpointError(f"The tokenizer of {folder} cannot be read: {message}.") from error
    if not isinstance(loaded, PreTrainedTokenizerFast):
        raise CheckpointError(f"{folder} has the tokenizer {type(loaded).__name__}; only fast ones are known here.")
    tokenizer, template = loaded.backend_tokenizer, loaded.chat_template
    if isinstance(tokenizer.decoder, tokenizers.decoders.CTC | tokenizers.decoders.BPEDecoder):
        name = type(tokenizer.decoder).__name__
        raise CheckpointError(f"{folder} has a tokenizer with the decoder {name}, which is not known here.")
    if not isinstance(template, str | dict | None):
        raise CheckpointError(f"The chat template of {folder} must be a text; got {template!r:.60}.")
    tokenizer.no_truncation()  # files may have training's truncation and padding
    tokenizer.no_padding()
    return Tokenizer(tokenizer, eos_ids(config, generation, loaded.eos_token_id), template, loaded.special_tokens_map)
