"""The families of examples/lib/families.py on tiny random checkpoints, against what transformers gives for them."""

import dataclasses
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy
from flax import nnx

import generate
import jaxpaged
import serve
from lib.checkpoint import CheckpointError, load_model, read_checkpoint
from lib.command_line import exit_code
from lib.engine_llama import create_engine
from lib.families import read_config
from lib.fields import Fields
from tests.examples.tiny_families import FAMILIES, GEMMA, HEADS, PLAIN, PROMPT, SIZES, VALUE, write_family

EXPECTED = json.loads(Path(__file__).with_name("data").joinpath("families.json").read_text())
NUM_BLOCKS, BLOCK_SIZE, CHUNK = 6, 4, 10


def paged_values(checkpoint, num_tokens):
    """The most likely tokens, and the logits of each. One program: the prompt in a step, then a token a step."""
    model = load_model(checkpoint, "float32")
    graph, weights = nnx.split(model)
    sizes = dict(num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE)
    cache = jaxpaged.KVCache.create(**sizes, **checkpoint.config.cache_sizes, dtype="float32")
    allocator = jaxpaged.BlockAllocator.create(**sizes, num_seqs=1, max_blocks_per_seq=NUM_BLOCKS - 1)

    @jax.jit
    def run(weights):
        model = nnx.merge(graph, weights)

        def step(carry, _):
            caches, allocator, tokens, count = carry
            allocator, slots, _ = allocator.append(count[None], q_len=CHUNK)
            slots = jnp.roll(slots[0], count)  # the newest slots are at the end of the row
            caches, logits = model(tokens, caches, allocator, slots, query_starts=jnp.stack([0 * count, count]))
            token = logits[0].argmax().astype(jnp.int32)
            return (caches, allocator, tokens.at[0].set(token), jnp.int32(1)), (token, logits[0])

        first = (cache,) * len(model.layers), allocator, jnp.asarray(PROMPT), jnp.int32(len(PROMPT))
        return jax.lax.scan(step, first, length=num_tokens)[1]

    tokens, logits = run(weights)
    return tokens.tolist(), np.asarray(logits)


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_and_tokens_are_those_of_transformers(family, tmp_path):
    write_family(tmp_path, family)
    expected = EXPECTED[family]
    tokens, logits = paged_values(read_checkpoint(tmp_path), len(expected["tokens"]))
    assert tokens == expected["tokens"]
    np.testing.assert_allclose(logits[:, expected["ids"]], expected["logits"], atol=3e-5)


def test_without_its_window_a_model_gives_others(tmp_path):
    write_family(tmp_path, "mistral")
    checkpoint = read_checkpoint(tmp_path)
    wrong = dataclasses.replace(checkpoint, config=dataclasses.replace(checkpoint.config, windows=None))
    _, logits = paged_values(wrong, 1)
    assert not np.allclose(logits[:, EXPECTED["mistral"]["ids"]], EXPECTED["mistral"]["logits"][:1], atol=0.1)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["gpt_oss", "deepseek_v2"])
def test_behind_an_engine(family, tmp_path):
    write_family(tmp_path, family)
    checkpoint = read_checkpoint(tmp_path)
    model = load_model(checkpoint, "float32")
    for layer in model.layers:
        # For an exact engine, which compiles one kind of step and not three.
        layer.self_attn.settings = dataclasses.replace(layer.self_attn.settings, num_partitions=1)
    sizes = dict(num_seats=1, max_length=20, block_size=BLOCK_SIZE, chunk_tokens=8)
    engine = create_engine(model, checkpoint.config, **sizes, dtype="float32", exact=True)
    expected = EXPECTED[family]["tokens"]
    params = jaxpaged.SamplingParams(max_tokens=len(expected), temperature=0.0)
    assert engine.generate([PROMPT], params)[0].outputs[0].token_ids == expected


@pytest.mark.slow
@pytest.mark.parametrize("scale", ["tensor", "token_head"])
def test_a_latent_of_8_bits(scale, tmp_path, capsys):
    write_family(tmp_path, "deepseek_v3")
    options = "--cache-dtype", "int8", "--cache-scale", scale, "--max-new-tokens", "2", "--json"
    assert exit_code(generate.main, ["--model", str(tmp_path), "--prompt", "ab", *options]) == 0
    assert len(json.loads(capsys.readouterr().out)["tokens"]) == 2


def test_a_latent_in_the_memory_of_a_server(tmp_path):
    write_family(tmp_path, "deepseek_v3")
    config = read_checkpoint(tmp_path).config
    options = ["--dtype=float32", "--cache-mb=1"]
    for devices in (1, 2):
        arguments = serve.parse_arguments([*options, f"--tensor-parallel={devices}"])
        assert serve.find_capacity(config, arguments).bytes_per_token == 2 * (16 + 4) * 4


def test_weights_of_8_bits_with_a_factor_a_block(tmp_path):
    write_family(tmp_path, "deepseek_v3", quantization_config=dict(quant_method="fp8", weight_block_size=[16, 12]))
    tensors = safetensors.numpy.load_file(tmp_path / "model.safetensors")
    name = "model.layers.1.self_attn.kv_b_proj.weight"
    weight = tensors[name].astype(jnp.float8_e4m3fn)  # [56, 16]
    factors = np.asarray([[1, 3], [2, 5], [0.5, 7], [4, 9]], np.float32)
    safetensors.numpy.save_file(tensors | {name: weight, f"{name}_scale_inv": factors}, tmp_path / "model.safetensors")
    found = load_model(read_checkpoint(tmp_path), "float32").layers[1].self_attn
    expected = weight.astype(np.float32) * factors.repeat(16, 0).repeat(12, 1)[:56, :16]
    of_heads = np.split(expected.reshape(HEADS, PLAIN + VALUE, 16), [PLAIN], axis=1)
    for projection, of_head in zip((found.k_b_proj, found.v_b_proj), of_heads, strict=True):
        np.testing.assert_array_equal(projection.kernel[...].T, of_head.reshape(-1, 16))


def test_layers_that_draft_are_left_out(tmp_path):
    write_family(tmp_path, "deepseek_v3")
    tensors = safetensors.numpy.load_file(tmp_path / "model.safetensors")
    tensors["model.layers.2.enorm.weight"] = np.ones(32, np.float32)
    safetensors.numpy.save_file(tensors, tmp_path / "model.safetensors")
    assert not [name for name in read_checkpoint(tmp_path).tensors if name.startswith("layers.2.")]
    write_family(tmp_path, "deepseek_v3", num_nextn_predict_layers=0)
    safetensors.numpy.save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match="it holds 3 layers; its config says 2"):
        read_checkpoint(tmp_path)


def test_an_expert_that_is_missing(tmp_path):
    write_family(tmp_path, "deepseek_v2")
    tensors = safetensors.numpy.load_file(tmp_path / "model.safetensors")
    del tensors["model.layers.1.mlp.experts.3.up_proj.weight"]
    safetensors.numpy.save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"cannot be read: 'layers.1.mlp.experts.3.up_proj.weight'"):
        load_model(read_checkpoint(tmp_path), "float32")


def make_config(family, **changes):
    return read_config(Fields({"model_type": family, **SIZES, **FAMILIES[family], **changes}))


def test_what_configs_leave_out():
    windows = make_config("gemma3_text", num_hidden_layers=12, sliding_window_pattern=6).windows
    assert windows == (*[6] * 5, None) * 2
    assert make_config("gpt_oss", sliding_window=128).windows == make_config("gemma2", sliding_window=128).windows
    assert make_config("mistral", sliding_window=None).windows is None
    assert make_config("qwen2", use_sliding_window=None).windows is None
    assert make_config("qwen2", layer_types=["sliding_attention", "full_attention"]).windows == (6, None)
    assert make_config("gemma2", final_logit_softcapping=None).final_soft_cap is None
    with_images = Fields(
        {
            "model_type": "gemma3",
            "text_config": dict(hidden_size=2560, intermediate_size=10_240, num_hidden_layers=34, sliding_window=1024),
        }
    )
    config = read_config(with_images)
    assert (config.num_heads, config.num_kv_heads, config.head_dim, config.vocab_size) == (8, 4, 256, 262_208)
    assert config.windows == ((*[1024] * 5, None) * 6)[:34]
    assert config.tie_embeddings


def test_the_rotary_fields_of_two_generations():
    of_windows, of_others = dict(rope_theta=20.0), dict(rope_theta=500.0, rope_type="linear", factor=8.0)
    nested = dict(sliding_attention=of_windows, full_attention=of_others)
    now = {"model_type": "gemma3_text", **SIZES, **GEMMA, "sliding_window_pattern": 2, "rope_parameters": nested}
    assert read_config(Fields(now)) == make_config("gemma3_text")
    parameters = FAMILIES["qwen3"]["rope_scaling"] | dict(rope_theta=500.0)
    now = {"model_type": "qwen3", **SIZES, "rope_parameters": parameters}
    assert read_config(Fields(now)) == make_config("qwen3")
    plain = make_config("llama", rope_scaling=None)
    assert make_config("llama", rope_scaling=dict(type="dynamic", factor=4.0)) == plain  # within its context


@pytest.mark.parametrize(
    ("family", "changes", "message"),
    [
        (
            "gemma2",
            dict(use_bidirectional_attention=True),
            "its use_bidirectional_attention is True, which is not known",
        ),
        (
            "gpt_oss",
            dict(quantization_config={"quant_method": "awq"}),
            "its quantization_config is of the method 'awq'",
        ),
        (
            "llama",
            dict(quantization_config={"quant_method": "mxfp4"}),
            "its quantization_config is of the method 'mxfp4'",
        ),
        ("llama", dict(quantization_config="fp8"), "expected a JSON object; got 'fp8'"),
        ("llama", dict(partial_rotary_factor=0.5), "its partial_rotary_factor is 0.5, which is not known here"),
        ("llama", dict(rope_scaling=dict(partial_rotary_factor=0.5)), "its partial_rotary_factor is 0.5"),
        ("llama", dict(rope_scaling=dict(mrope_section=[1, 1, 2])), "its mrope_section is"),
        ("mistral", dict(layer_types=["full_attention"] * 2), "its layer_types is"),
        ("qwen3", dict(layer_types=["full_attention"] * 2, use_sliding_window=True), None),
        (
            "gpt_oss",
            dict(layer_types=["full_attention", "chunked_attention"]),
            "layer_types must be 2 of sliding_attention",
        ),
        ("gpt_oss", dict(layer_types=["full_attention"]), "layer_types must be 2 of sliding_attention, full_attention"),
        ("gpt_oss", dict(num_experts_per_tok=5), "num_experts_per_tok must be a whole number from 1 to 4; got 5"),
        ("gpt_oss", dict(num_local_experts=None), "num_local_experts"),
        ("gpt_oss", dict(sliding_window=None), "sliding_window"),
        ("gpt_oss", dict(sliding_window=0), "sliding_window must be a whole number from 1"),
        ("deepseek_v2", dict(norm_topk_prob=True), "its norm_topk_prob is True, which is not known here"),
        ("deepseek_v2", dict(topk_method="noaux_tc"), "its topk_method is 'noaux_tc'; known here are greedy, group"),
        ("deepseek_v3", dict(scoring_func="softmax"), "its scoring_func is softmax, which is not known here"),
        ("deepseek_v3", dict(n_group=3), "its 8 experts do not go evenly into 3 groups"),
        ("deepseek_v3", dict(kv_lora_rank=None), "kv_lora_rank"),
        ("deepseek_v2", dict(quantization_config={"quant_method": "fp8"}), "is of the method 'fp8'"),
        ("deepseek_v3", dict(first_k_dense_replace=2), None),
        ("gemma2", dict(hidden_activation="gelu"), "it has the activation 'gelu'"),
        ("gemma2", dict(attn_logit_softcapping=0), "attn_logit_softcapping must be a number from 0.001"),
        ("gemma2", dict(query_pre_attn_scalar="8"), "query_pre_attn_scalar must be a number from 0.001"),
        ("gemma3_text", dict(sliding_window_pattern=0), "sliding_window_pattern must be a whole number from 1"),
        (
            "gemma3_text",
            dict(rope_scaling=dict(rope_type="yarn", factor=4.0, original_max_position_embeddings=8)),
            "factor",
        ),
    ],
)
def test_what_is_refused_by_name(family, changes, message):
    if message is None:
        make_config(family, **changes)
        return
    with pytest.raises((KeyError, ValueError)) as error:
        make_config(family, **changes)
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_a_refusal_is_one_sentence(tmp_path):
    write_family(tmp_path, "llama", partial_rotary_factor=0.5)
    with pytest.raises(CheckpointError) as error:
        read_checkpoint(tmp_path)
    assert str(error.value).endswith(": its partial_rotary_factor is 0.5, which is not known here.")


def test_experts_in_four_bits(tmp_path):
    write_family(tmp_path, "gpt_oss", quantization_config={"quant_method": "mxfp4"})
    tensors = safetensors.numpy.load_file(tmp_path / "model.safetensors")
    name = "model.layers.1.mlp.experts.gate_up_proj"
    blocks, scales, expected = (np.asarray(array) for array in EXPECTED["mxfp4"].values())
    shape = tensors.pop(name).shape
    tensors[f"{name}_blocks"] = np.broadcast_to(blocks.astype(np.uint8), (shape[0], shape[2], 1, 16)).copy()
    tensors[f"{name}_scales"] = np.broadcast_to(scales.astype(np.uint8), (shape[0], shape[2], 1)).copy()
    safetensors.numpy.save_file(tensors, tmp_path / "model.safetensors")
    found = load_model(read_checkpoint(tmp_path), "float32").layers[1].mlp.experts.gate_up_proj[...]
    np.testing.assert_array_equal(found.swapaxes(1, 2), np.broadcast_to(expected[:, None], shape))
