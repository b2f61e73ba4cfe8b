"""Reads a folder in Hugging Face form, of any family in families.py."""

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
    # Extra layers after the last one, which draft tokens.
    drafting = range(fields.whole("num_nextn_predict_layers", 0, MOST_LAYERS, 0))
    behind = tuple(f"layers.{config.num_layers + i}." for i in drafting)
    tensors = {name: read for name, read in tensors.items() if not name.startswith(behind)}
    generation = read_generation_config(folder)
    return Checkpoint(config, _folder_tokenizer(folder, fields, generation), tensors, sampling_defaults(generation))


def _plain_names(tensors: Tensors) -> Tensors:
    """The tensors by the names of llama.py."""
    plain: Tensors = {}
    for name, read in tensors.items():
        short = plain_name(name)
        if short in plain:
            raise ValueError(f"it holds {short[:100]} twice, once as {name[:100]}")
        plain[short] = read
    return plain


def _is_tied(tensors: Tensors) -> bool:
    """False if a head is there that differs from the embeddings: as in transformers, it is then used."""
    head = tensors.get("lm_head.weight")
    return head is None or np.array_equal(head(), tensors["embed_tokens.weight"]())


def _rearrange(tensors: Tensors, config: LlamaConfig, fields: Fields) -> None:
    """Adds the tensors of llama.py that a checkpoint holds in another form; each is computed when it is read."""

    def add(suffix: str, compute: Callable[..., np.ndarray], *inputs: str) -> None:
        """Where tensors end in `inputs`, the one that ends in `suffix` instead."""
        for name in [name for name in tensors if name.endswith(inputs[0])]:
            stem = name.removesuffix(inputs[0])
            tensors[stem + suffix] = functools.partial(_computed, compute, [tensors[stem + each] for each in inputs])

    block = Fields(fields.get("quantization_config", {})).get("weight_block_size", [128, 128])
    add("", _unpacked, "_blocks", "_scales")
    add(".weight", functools.partial(_widened, block=block), ".weight_scale_inv", ".weight")
    add(".experts.gate_up_proj", _turned, ".experts.gate_up_proj")
    _stack_experts(tensors)
    for i, part in enumerate(("k", "v")):
        of_each_head = functools.partial(_of_each_head, config=config, part=i)
        add(f".{part}_b_proj.weight", of_each_head, ".kv_b_proj.weight")


def _computed(compute: Callable[..., np.ndarray], inputs: list[Callable[[], np.ndarray]]) -> np.ndarray:
    return compute(*(read() for read in inputs))


def _unpacked(blocks: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """Experts [experts, in, out] in float32, of MXFP4: numbers of four bits, each 32 of them with an exponent.

    The blocks are uint8 [experts, out, in / 32, 16], the number in a byte's lower bits first, the scales uint8
    [experts, out, in / 32].
    """
    numbers = np.stack([blocks & 15, blocks >> 4], axis=-1).view(jnp.float4_e2m1fn).astype(np.float32)
    numbers = numbers.reshape(*scales.shape, 32) * scales.view(jnp.float8_e8m0fnu).astype(np.float32)[..., None]
    return numbers.reshape(*scales.shape[:2], -1).swapaxes(1, 2)


def _widened(factors: np.ndarray, weight: np.ndarray, *, block: list[int]) -> np.ndarray:
    """A weight [out, in] in float32, of float8 with a factor for each block; the last blocks may be cut off."""
    rows, columns = (np.arange(size) // of_block for size, of_block in zip(weight.shape, block, strict=True))
    return weight.astype(np.float32) * factors.astype(np.float32)[rows[:, None], columns]


def _turned(experts: np.ndarray) -> np.ndarray:
    return experts.swapaxes(1, 2)


def _stack_experts(tensors: Tensors) -> None:
    """Adds [experts, hidden features, features] of experts that a checkpoint stores one by one, gate before up."""
    counts: dict[str, int] = {}
    for name in tensors:
        if match := re.fullmatch(r"(.+\.experts)\.(\d{1,5})\.down_proj\.weight", name):
            counts[match[1]] = max(counts.get(match[1], 0), int(match[2]) + 1)
    for stem, count in counts.items():
        read = functools.partial(_stacked, tensors, stem, count)
        tensors[f"{stem}.gate_up_proj"] = functools.partial(read, "gate_proj", "up_proj")
        tensors[f"{stem}.down_proj"] = functools.partial(_computed, _turned, [functools.partial(read, "down_proj")])


def _stacked(tensors: Tensors, stem: str, count: int, *parts: str) -> np.ndarray:
    names = [[f"{stem}.{i}.{part}.weight" for part in parts] for i in range(count)]
    return np.stack([np.concatenate([tensors[name]() for name in of_expert]) for of_expert in names])


def _of_each_head(both: np.ndarray, *, config: LlamaConfig, part: int) -> np.ndarray:
    """The projection to keys (part 0) or values (1). A checkpoint stores both in one tensor, head by head."""
    by_head = both.reshape(config.num_heads, -1, both.shape[-1])
    return np.split(by_head, [config.head_dim], axis=1)[part].reshape(-1, both.shape[-1])


def _folder_tokenizer(folder: Path, config: Fields, generation: Fields) -> Tokenizer:
    # Its class also depends on these fields of the config, which has been checked.
    family = AutoConfig.for_model(config.text("model_type"), tokenizer_class=config.get("tokenizer_class", None))
    try:
        loaded = AutoTokenizer.from_pretrained(folder, config=family, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # tokenizers raises no narrower class
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
    tokenizer.no_truncation()  # a file has them from training
    tokenizer.no_padding()
    return Tokenizer(tokenizer, eos_ids(config, generation, loaded.eos_token_id), template, loaded.special_tokens_map)
