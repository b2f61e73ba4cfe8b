"""Adapters in PEFT's format: their scale, and the refusal of variants of LoRA."""

import json

import numpy as np
import pytest

pytest.importorskip("safetensors")

from lib.adapters import read_adapter
from lib.checkpoint import CheckpointError
from tests.examples.tiny_checkpoint import changed_tensors, write_adapter

Q, UP = "layers.0.self_attn.q_proj", "layers.0.mlp.up_proj"
LAYERS = "self_attn.q_proj", "mlp.up_proj"


def products(folder):
    return {layer: b.T @ a for layer, (a, b) in read_adapter(folder).items()}


@pytest.mark.parametrize(
    ("changes", "scales"),
    [
        (dict(), (3 / 4, 3 / 4)),
        (dict(use_rslora=True), (3 / 2, 3 / 2)),
        (dict(alpha_pattern={"q_proj": 8}), (8 / 4, 3 / 4)),
        (dict(alpha_pattern={"up_proj": 8}, use_rslora=True), (3 / 2, 8 / 2)),
        (dict(alpha_pattern={"^model.layers.0.self_attn.q_proj": 8, "q_proj": 16}), (8 / 4, 3 / 4)),  # the first counts
        (dict(alpha_pattern={r"layers\.\d+\.mlp\.(up|gate)_proj": 0.5}), (3 / 4, 0.5 / 4)),
        (dict(alpha_pattern={"proj": 8, "layers.0": 8, "lf_attn.q_proj": 8}), (3 / 4, 3 / 4)),  # whole names at the end
        (dict(r=2, rank_pattern={"self_attn.q_proj": 4, "up_proj": 4}), (3 / 4, 3 / 4)),
        (dict(r=2, rank_pattern={"proj|.*_proj": 4}, use_rslora=True), (3 / 2, 3 / 2)),
    ],
)
def test_the_scale_of_each_layer_equals_peft(tmp_path, changes, scales):
    merged = write_adapter(tmp_path, seed=1, rank=4, layers=LAYERS, **changes)  # scaled by 3 / 4
    found = products(tmp_path)
    for layer, scale in zip((Q, UP), scales, strict=True):
        np.testing.assert_allclose(found[layer], merged[f"model.{layer}.weight"] * (scale / (3 / 4)), atol=1e-5)


def test_a_rank_unlike_the_config_is_refused(tmp_path):
    write_adapter(tmp_path, seed=1, rank=4, layers=LAYERS, r=8)
    with pytest.raises(CheckpointError, match=r"has factors .4, 48. and .\d+, 4.; its config says rank 8"):
        read_adapter(tmp_path)


REFUSED = dict(
    alora_invocation_tokens=[5, 6],
    task_type="SEQ_CLS",
    peft_type="ADALORA",
    use_dora=True,
    use_qalora=True,
    bias="all",
    lora_bias=True,
    fan_in_fan_out=True,
    modules_to_save=["lm_head"],
    target_parameters=["mlp.experts.gate_up_proj"],
    trainable_token_indices=[1, 2],
    layer_replication=[[0, 1]],
    kasa_config={"beta": 1e-4},
    a_later_variant=True,
)
WITH_CHANGED_WEIGHTS = "pissa", "pissa_niter_4", "olora", "corda", "loftq", "lora_ga", "mica"


@pytest.mark.parametrize(
    ("name", "value"), [*REFUSED.items(), *(("init_lora_weights", value) for value in WITH_CHANGED_WEIGHTS)]
)
def test_variants_of_lora_are_refused_by_name(tmp_path, name, value):
    write_adapter(tmp_path, seed=1, rank=1, layers=LAYERS, **{name: value})
    with pytest.raises(CheckpointError) as error:
        read_adapter(tmp_path)
    assert str(error.value).endswith(f"its {name} is {value}, which is not known here.")


# LoraConfig(target_modules=["q_proj", "up_proj"], task_type="CAUSAL_LM").to_dict() of PEFT 0.21
SAVED = """{"task_type": "CAUSAL_LM", "peft_type": "LORA", "auto_mapping": null, "peft_version": "0.21.2",
"base_model_name_or_path": "a/model", "revision": null, "inference_mode": true, "r": 1,
"target_modules": ["q_proj", "up_proj"], "exclude_modules": null, "lora_alpha": 3, "lora_dropout": 0.05,
"fan_in_fan_out": false, "bias": "none", "use_rslora": false, "modules_to_save": null, "init_lora_weights": true,
"layers_to_transform": null, "layers_pattern": null, "rank_pattern": {}, "alpha_pattern": {}, "megatron_config": null,
"megatron_core": "megatron.core", "trainable_token_indices": null, "loftq_config": {}, "eva_config": null,
"corda_config": null, "lora_ga_config": null, "use_dora": false, "velora_config": null, "alora_invocation_tokens": null,
"use_qalora": false, "qalora_group_size": 16, "monteclora_config": null, "layer_replication": null, "lora_bias": false,
"target_parameters": null, "use_bdlora": null, "arrow_config": null, "kasa_config": null,
"ensure_weight_tying": false}"""


@pytest.mark.parametrize(
    "change",
    [
        dict(),
        dict(modules_to_save=[], task_type=None, target_parameters=[]),
        dict(init_lora_weights="gaussian"),
        dict(init_lora_weights="eva", eva_config={"rho": 2.0}),  # PEFT keeps the model's weights and saves the patterns
        dict(init_lora_weights=False),
    ],
)
def test_a_config_as_peft_saves_it_is_plain(tmp_path, change):
    merged = write_adapter(tmp_path, seed=1, rank=1, layers=LAYERS, **json.loads(SAVED) | change)
    np.testing.assert_allclose(products(tmp_path)[Q], merged[f"model.{Q}.weight"], atol=1e-5)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(rank_pattern=[1]), "expected a JSON object; got"),
        (dict(rank_pattern={"q_proj": 0}), "rank_pattern must be a whole number from 1"),
        (dict(alpha_pattern={"q_proj": "x"}), "alpha_pattern must be a number from 0"),
        (dict(alpha_pattern={"(q_proj": 1}), "cannot be read as an adapter"),
    ],
)
def test_wrong_patterns_are_refused(tmp_path, change, message):
    write_adapter(tmp_path, seed=1, rank=1, layers=LAYERS, **change)
    with pytest.raises(CheckpointError, match=message):
        read_adapter(tmp_path)


def test_an_adapter_of_a_model_that_reads_images_too(tmp_path):
    write_adapter(tmp_path, seed=1, rank=1, layers=LAYERS)
    before = "model.layers"
    for after in ("model.language_model.layers", "language_model.model.layers"):
        with changed_tensors(tmp_path / "adapter_model.safetensors") as tensors:
            for name in list(tensors):
                tensors[name.replace(before, after)] = tensors.pop(name)
        before = after
        assert set(read_adapter(tmp_path)) == {Q, UP}
