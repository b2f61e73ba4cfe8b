"""Writes what transformers computes to tests/examples/data/families.json, and prints frequencies for test_rotary.py.

    python -m pip install torch transformers safetensors tokenizers
    PYTHONPATH=. python tools/transformers_values.py

Of each tiny checkpoint of tests/examples/tiny_families.py it stores the most likely tokens after the prompt, the least
that one of them is ahead of the second, and some logits of each step. It checks that save_family writes the config and
the tensors that transformers saves for the model.
"""

import json
import tempfile
from pathlib import Path

import numpy as np
import safetensors.numpy
import torch
import transformers
from transformers.integrations.mxfp4 import convert_moe_packed_tensors
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from tests.examples.tiny_families import FAMILIES, PROMPT, save_family, write_family

NUM_TOKENS, IDS = 8, (0, 7, 33, 104, 255, 298)
LLAMA3 = dict(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=8192)
LONGROPE = dict(
    factor=32.0,
    long_factor=[1.0 + 0.5 * i for i in range(8)],
    short_factor=[1.0 + 0.125 * i for i in range(8)],
    original_max_position_embeddings=4096,
)
SCALINGS = [  # type, fields, theta, context of the config, longest sequence
    ("llama3", LLAMA3, 500_000.0, 131_072, None),
    ("yarn", dict(factor=4.0, original_max_position_embeddings=32_768), 1e6, 131_072, None),
    ("yarn", dict(factor=32.0, truncate=False, original_max_position_embeddings=4096), 150_000.0, 131_072, None),
    ("dynamic", dict(factor=2.0), 1e4, 4096, 100),
    ("dynamic", dict(factor=2.0), 1e4, 4096, 4096),
    ("dynamic", dict(factor=2.0), 1e4, 4096, 16_384),
    ("longrope", LONGROPE, 1e4, 131_072, 4096),
    ("longrope", LONGROPE, 1e4, 131_072, 4097),
]


def compute_values(family: str) -> dict:
    with tempfile.TemporaryDirectory() as folder:
        write_family(Path(folder), family)
        model, loading = transformers.AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
        )
        check_saved(model, family, Path(folder))
    assert not loading["missing_keys"], loading
    assert not loading["unexpected_keys"], loading
    tokens, logits = list(PROMPT), []
    with torch.no_grad():
        for _ in range(NUM_TOKENS):
            logits.append(model(torch.tensor([tokens]), use_cache=False).logits[0, -1])
            tokens.append(int(logits[-1].argmax()))
    best, second = torch.stack(logits).topk(2).values.T
    return {
        "tokens": tokens[len(PROMPT) :],
        "gap": round(float((best - second).min()), 4),
        "ids": IDS,
        "logits": [[round(float(row[i]), 6) for i in IDS] for row in logits],
    }


def check_saved(model: transformers.PreTrainedModel, family: str, folder: Path) -> None:
    model.save_pretrained(folder / "expected")
    save_family(folder / "found", family)
    expected, found = (json.loads((folder / name / "config.json").read_text()) for name in ("expected", "found"))
    assert found == expected, family
    expected, found = (
        safetensors.numpy.load_file(folder / name / "model.safetensors") for name in ("expected", "found")
    )
    assert found.keys() == expected.keys(), family
    for name, tensor in expected.items():
        np.testing.assert_array_equal(found[name], tensor, name)


def mxfp4_values() -> dict:
    """A row of 32 numbers in four bits each."""
    blocks, scale = torch.arange(7, 256, 16, dtype=torch.uint8), torch.tensor([124], dtype=torch.uint8)
    row = convert_moe_packed_tensors(blocks[None, None, None], scale[None, None], dtype=torch.float32)
    return {"blocks": blocks.tolist(), "scales": scale.tolist(), "numbers": row[0, :, 0].tolist()}


def print_frequencies() -> None:
    for kind, fields, theta, context, length in SCALINGS:
        config = transformers.LlamaConfig(
            hidden_size=32,
            num_attention_heads=2,
            max_position_embeddings=context,
            rope_parameters=fields | dict(rope_type=kind, rope_theta=theta),
        )
        frequencies, factor = ROPE_INIT_FUNCTIONS[kind](config, "cpu", seq_len=length)
        print(kind, length, [float(f"{frequency:.7g}") for frequency in frequencies.tolist()], factor)


if __name__ == "__main__":
    print_frequencies()
    found = {"transformers": transformers.__version__} | {family: compute_values(family) for family in FAMILIES}
    found["mxfp4"] = mxfp4_values()
    lines = [f"  {json.dumps(name)}: {json.dumps(values)}" for name, values in found.items()]
    Path("tests/examples/data/families.json").write_text("{\n" + ",\n".join(lines) + "\n}\n")
