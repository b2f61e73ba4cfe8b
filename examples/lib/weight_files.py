"""Reads tensors from *.safetensors files on demand."""

import functools
import io
import json
import re
from collections.abc import Callable
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import safetensors

from lib.checkpoint import CheckpointError
from lib.fields import Fields, read_json

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
# Prefixes of the names of weights. The first three are of models that also read images; the third keeps `lm_head`.
PREFIX = r"^(language_model\.model|model\.language_model|language_model(?=\.lm_head)|model)\."
Tensors = dict[str, Callable[[], np.ndarray]]


def read_weights(folder: Path) -> Tensors:
    """The tensors of model.safetensors, or else the tensors that the index names. Other files are ignored.

    Raises `CheckpointError`, or one of READ_ERRORS.
    """
    if (folder / WEIGHTS).exists():
        return read_safetensors(folder / WEIGHTS)
    if not (folder / INDEX).exists():
        others = sorted(file.name for suffix in ("safetensors", "bin", "pth") for file in folder.glob(f"*.{suffix}"))
        raise CheckpointError(
            f"{folder} holds neither {WEIGHTS} nor {INDEX}; its other weights: {', '.join(others)[:200] or 'none'}; "
            f"save the model with transformers' save_pretrained, or rename the file that holds all of it to {WEIGHTS}."
        )
    named = Fields(read_json(folder / INDEX).get("weight_map"))
    files = {name: named.text(name) for name in named.values}
    tensors: Tensors = {}
    owners: dict[str, str] = {}
    for file in sorted(set(files.values())):
        if Path(file).name != file:
            raise ValueError(f"{INDEX} names {file[:100]!r}, which is not in the folder")
        if not (folder / file).exists():
            raise ValueError(f"{file} is missing, which {INDEX} names; is the download complete?")
        for name, read in read_safetensors(folder / file).items():
            if name in owners:
                raise ValueError(f"{owners[name]} and {file} both define {name}; save the model into an empty folder")
            tensors[name], owners[name] = read, file
    for name, file in files.items():
        if owners.get(name) != file:
            raise ValueError(f"{INDEX} names {name[:100]} in {file}, which lacks it")
    return {name: tensors[name] for name in files}


def plain_name(name: str) -> str:
    """The name of a module or tensor in llama.py, which begins with layers, embed_tokens, norm or lm_head."""
    return re.sub(PREFIX, "", name)


def read_safetensors(file: Path) -> Tensors:
    if not file.is_file():
        raise CheckpointError(f"{file} is no regular file.")  # reading a pipe would wait
    try:
        tensors = safetensors.safe_open(file, framework="flax")
    except safetensors.SafetensorError as error:
        raise ValueError(f"{file.name}: {error}") from error
    return {name: functools.partial(_get_tensor, file, tensors, name) for name in tensors.keys()}  # noqa: SIM118 (not a dict)


def _get_tensor(file: Path, tensors: safetensors.safe_open, name: str) -> np.ndarray:
    try:
        if tensors.get_slice(name).get_dtype() == "F8_E4M3":
            return _read_float8(file, name)
        return np.asarray(tensors.get_tensor(name))
    except safetensors.SafetensorError as error:
        raise ValueError(str(error)) from error


def _read_float8(file: Path, name: str) -> np.ndarray:
    """Reads a float8 tensor, which safetensors cannot return as a NumPy array.

    The file has the length of a JSON header, the header, and then the numbers.
    """
    with file.open("rb") as stream:
        header = json.loads(stream.read(int.from_bytes(stream.read(8), "little")))
        start, end = header[name]["data_offsets"]
        stream.seek(start, io.SEEK_CUR)
        return np.frombuffer(stream.read(end - start), jnp.float8_e4m3fn).reshape(header[name]["shape"])
