"""Broken checkpoints: each is refused with one sentence."""

import json
import os
import re
import subprocess
import sys

import numpy as np
import pytest

pytest.importorskip("gguf")

import safetensors.numpy

from lib.checkpoint import CheckpointError, load_model, read_checkpoint
from lib.fields import Fields
from lib.gguf_file import _gguf_tokenizer
from tests.examples.tiny_checkpoint import changed_tensors, write_checkpoint


@pytest.fixture
def folder(tmp_path):
    write_checkpoint(tmp_path, num_layers=2)
    return tmp_path


def refused(folder) -> str:
    with pytest.raises(CheckpointError) as error:
        load_model(read_checkpoint(folder), "float32")
    message = str(error.value)
    assert "\n" not in message
    assert len(message) < 500
    return message


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_hidden_layers": 3}, "it holds 2 layers; its config says 3"),
        ({"num_hidden_layers": 1}, "it holds 2 layers; its config says 1"),
        ({"num_key_value_heads": 4}, "6 heads do not go evenly to 4 KV heads"),
        ({"eos_token_id": 300}, r"its end-of-text tokens \(300, 299\) are not all of the vocabulary"),
        ({"head_dim": 7}, "head_dim"),
        ({"hidden_size": 6 * 2**17, "intermediate_size": 2**20, "vocab_size": 2**24}, "its config says"),
        ({"attention_bias": True}, "holds no tensor"),
    ],
)
def test_inconsistent_fields_are_refused(folder, changes, message):
    write_checkpoint(folder, num_layers=2, **changes)
    assert re.search(message, refused(folder))


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("a.gguf", "this is not a GGUF file", "cannot be read as a checkpoint"),
        ("a.gguf", "", "cannot be read as a checkpoint"),
        ("config.json", '{"a":' * 100_000, "config.json: maximum recursion depth exceeded"),
        ("config.json", "[1]", "config.json: expected a JSON object; got [1]"),
        ("config.json", '{"model_type": "llama"}', "it holds 2 layers; its config says 32"),  # transformers' default
        (
            "tokenizer_config.json",
            '{"eos_token": {"content": 5}}',
            "cannot be read: TypeError: Special token eos_token",
        ),
        ("tokenizer_config.json", '{"chat_template": 5}', "must be a text; got 5"),
        ("model.safetensors", "x" * 100, "cannot be read"),
    ],
)
def test_files_that_are_not_checkpoints(folder, file, content, message):
    (folder / file).write_text(content)
    assert message in refused(folder / file if file == "a.gguf" else folder)


def test_missing_files_and_folders_in_their_place(folder):
    (folder / "model.safetensors").unlink()
    os.mkfifo(folder / "model.safetensors")
    assert "model.safetensors is no regular file" in refused(folder)
    assert "model.safetensors is no regular file" in refused(folder / "model.safetensors")
    (folder / "config.json").unlink()
    assert "holds no config.json" in refused(folder)


def test_weights_come_from_model_safetensors_or_its_index(folder):
    tensors = write_checkpoint(folder)
    others = {name: -tensor for name, tensor in tensors.items()}
    for name in ("a", "model_old", "optimizer", "model-00001-of-00002", "zzz"):
        safetensors.numpy.save_file(others | {"step": np.zeros(1, np.float32)}, folder / f"{name}.safetensors")
    expected = tensors["model.norm.weight"]
    np.testing.assert_array_equal(read_checkpoint(folder).tensors["norm.weight"](), expected)
    write_shards(folder, tensors)
    read = read_checkpoint(folder).tensors
    assert len(read) == len(tensors)
    np.testing.assert_array_equal(read["norm.weight"](), expected)


def write_shards(folder, tensors) -> dict[str, str]:
    """Replaces model.safetensors by two shards and an index; returns the index."""
    (folder / "model.safetensors").unlink()
    files = {name: f"model-0000{1 + i % 2}-of-00002.safetensors" for i, name in enumerate(sorted(tensors))}
    for file in set(files.values()):
        safetensors.numpy.save_file({name: tensors[name] for name in tensors if files[name] == file}, folder / file)
    write_index(folder, files)
    return files


def write_index(folder, files) -> None:
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": files}))


def test_an_index_that_does_not_match_its_files_is_refused(folder):
    tensors = write_checkpoint(folder)
    files = write_shards(folder, tensors)
    first, second = sorted(set(files.values()))
    name = min(name for name in files if files[name] == first)
    write_index(folder, files | {name: second})
    assert f"names {name} in {second}, which lacks it" in refused(folder)
    write_index(folder, files | {name: f"../{first}"})
    assert "which is not in the folder" in refused(folder)
    write_index(folder, files | {name: 5})
    assert f"{name} must be a text; got 5" in refused(folder)
    write_index(folder, [])
    assert "expected a JSON object; got []" in refused(folder)
    write_index(folder, files)
    safetensors.numpy.save_file({n: t for n, t in tensors.items() if files[n] == second or n == name}, folder / second)
    assert f"{first} and {second} both define {name}" in refused(folder)
    (folder / second).unlink()
    assert f"{second} is missing, which model.safetensors.index.json names" in refused(folder)


def test_a_folder_without_model_safetensors_names_what_it_holds(folder):
    (folder / "model.safetensors").rename(folder / "consolidated.safetensors")
    (folder / "pytorch_model.bin").touch()
    message = refused(folder)
    assert "holds neither model.safetensors nor model.safetensors.index.json" in message
    assert "consolidated.safetensors, pytorch_model.bin" in message
    assert "save_pretrained" in message


def test_two_tensors_of_one_name_are_refused(folder):
    with changed_tensors(folder / "model.safetensors") as tensors:
        tensors["language_model.model.norm.weight"] = tensors["model.norm.weight"]
    assert "it holds norm.weight twice" in refused(folder)


def test_a_different_head_is_used_although_the_config_ties_it(folder):
    tensors = write_checkpoint(folder, tie_word_embeddings=True)
    model = load_model(read_checkpoint(folder), "float32")
    np.testing.assert_array_equal(model.lm_head.weight[...], tensors["lm_head.weight"])
    with changed_tensors(folder / "model.safetensors") as tensors:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]
    assert load_model(read_checkpoint(folder), "float32").lm_head is None


def test_transformers_is_imported_only_for_folders_and_prints_nothing(folder):
    """Importing transformers is slower than all other imports."""
    script = """
import sys
from pathlib import Path
from lib.checkpoint import default_path, read_checkpoint
for path in (default_path(), Path(sys.argv[1])):
    read_checkpoint(path)
    print("transformers" in sys.modules)
"""
    paths = os.pathsep.join(["examples", *sys.path])
    environment = {k: v for k, v in os.environ.items() if k != "TRANSFORMERS_VERBOSITY"} | {"PYTHONPATH": paths}
    command = [sys.executable, "-c", script, str(folder)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "True"]
    assert done.stderr == ""


def test_weights_of_nan(folder):
    with changed_tensors(folder / "model.safetensors") as tensors:
        tensors["model.layers.1.mlp.up_proj.weight"][3, 5] = np.nan
    assert refused(folder) == "The checkpoint's tensor layers.1.mlp.up_proj.weight holds NaN or infinity."


def test_a_gguf_file_with_a_broken_tokenizer(tmp_path):
    fields = {
        "model": "gpt2",
        "tokens": ["a", "b", "ab"],
        "token_type": [1, 1, 1],
        "merges": ["a b"],
        "eos_token_id": 2,
    }

    def read(**changes):
        return _gguf_tokenizer(tmp_path, Fields({f"tokenizer.ggml.{k}": v for k, v in (fields | changes).items()}))

    assert read().encode("ab") == [2]
    with pytest.raises(CheckpointError, match="has a broken tokenizer: "):
        read(merges=["a c"])
    for field in ("eos_token_id", "bos_token_id"):
        for wrong in (-1, 3, 2**31, "a"):
            with pytest.raises(ValueError, match=f"{field} must be a whole number from 0 to 2"):
                read(**{field: wrong})


def write_settings(folder, **files) -> None:
    """Changes fields of the folder's JSON files: config, generation_config, tokenizer_config."""
    for name, changes in files.items():
        file = folder / f"{name}.json"
        fields = json.loads(file.read_text()) if file.exists() else {}
        file.write_text(json.dumps(fields | changes))


def test_a_text_ends_at_each_eos_token_of_any_file(folder):
    write_settings(folder, config=dict(eos_token_id=5), tokenizer_config=dict(eos_token="<eos>"))
    assert read_checkpoint(folder).tokenizer.eos_ids == (5, 299)
    write_settings(folder, generation_config=dict(eos_token_id=[7, 299]))
    assert read_checkpoint(folder).tokenizer.eos_ids == (7, 299, 5)
    write_settings(folder, generation_config=dict(eos_token_id=None), config=dict(eos_token_id=None))
    assert read_checkpoint(folder).tokenizer.eos_ids == (299,)
    write_settings(folder, tokenizer_config=dict(eos_token=None))
    assert read_checkpoint(folder).tokenizer.eos_ids == ()
    for wrong in (-1, "a", [[1]], 0.5, True):
        write_settings(folder, generation_config=dict(eos_token_id=wrong))
        assert "eos_token_id must be a whole number" in refused(folder)


@pytest.mark.parametrize(
    ("fields", "defaults"),
    [
        (dict(), {}),
        (dict(do_sample=True, temperature=0.6, top_p=0.9), dict(temperature=0.6, top_p=0.9)),
        (dict(do_sample=True, top_k=64, top_p=0.95, cache_implementation="hybrid"), dict(top_p=0.95, top_k=64)),
        (dict(temperature=0.7), dict(temperature=0.7)),
        (dict(do_sample=False, temperature=0.7), dict(temperature=0.0)),
        (dict(do_sample=True, temperature=None, top_k=0), {}),
        (dict(do_sample=True, top_k=-1, max_new_tokens=2048, pad_token_id=0), {}),
    ],
)
def test_sampling_defaults_come_from_generation_config(folder, caplog, fields, defaults):
    assert read_checkpoint(folder).sampling_defaults == {}
    write_settings(folder, generation_config=fields)
    assert read_checkpoint(folder).sampling_defaults == defaults
    assert not caplog.records


def test_unsupported_sampling_is_reported(folder, caplog):
    write_settings(folder, generation_config=dict(repetition_penalty=1.1, min_p=0.0, top_p=0.8))
    assert read_checkpoint(folder).sampling_defaults == {"top_p": 0.8}
    assert [record.message for record in caplog.records] == [
        "generation_config.json sets repetition_penalty to 1.1, which is not applied here."
    ]


@pytest.mark.parametrize("name", ["temperature", "top_k", "top_p", "do_sample"])
def test_a_broken_generation_config_is_refused(folder, name):
    for wrong in ("x", [], -2, {"a": 1}, float("nan")):
        write_settings(folder, generation_config={name: wrong})
        assert f"{name} must be" in refused(folder)
    write_settings(folder, generation_config={name: None, "max_new_tokens": 0})
    assert "generation_config.json: `max_new_tokens` must be greater than 0" in refused(folder)
    (folder / "generation_config.json").write_text("[")
    assert "generation_config.json: Expecting value" in refused(folder)
