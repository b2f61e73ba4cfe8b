"""The families of examples/lib/families.py on tiny random checkpoints, against results of transformers."""

import dataclasses
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from transformers import AutoConfig

import jaxpaged
import serve
from lib.checkpoint import CheckpointError, load_model, one_line, read_checkpoint
from lib.engine_llama import create_engine
from lib.families import read_config
from lib.fields import Fields
from tests.examples import tiny_families
from tests.examples.tiny_checkpoint import changed_tensors
from tests.examples.tiny_families import FAMILIES, GEMMA, HEADS, PLAIN, PROMPT, SIZES, VALUE, save_family, write_family

EXPECTED = json.loads(Path(__file__).with_name("data").joinpath("families.json").read_text())
NUM_BLOCKS, BLOCK_SIZE, CHUNK = 6, 4, 10
# Wrong values for nearly any field of a config, and the ones that a Llama accepts.
WRONG = ["x", [], [1], {"a": {"b": 1}}, None, True, 0, -1, 0.5, float("nan"), 2**31, 10**40]
HARMLESS = {
    "num_key_value_heads": [None],  # the number of heads: refused when the weights are read
    "head_dim": [None],
    "rms_norm_eps": [0.5],
    "rope_theta": [None, 2**31],
    "rope_scaling": [None],
    "tie_word_embeddings": [None, True],
    "attention_bias": [None, True],  # true: a bias is missed once the weights are read
    "mlp_bias": [None, True],
    "rope_type": [None],
    "factor": [0.5],
    "low_freq_factor": [0.5],
    "original_max_position_embeddings": [None],  # max_position_embeddings
}


MIXTURES = ("mixtral", "qwen3_moe", "gpt_oss", "deepseek_v2", "deepseek_v3")


def paged_values(checkpoint, num_tokens):
    """The most likely tokens, and the logits of each. One program: the prompt in one step, then one token per step."""
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
            slots = jnp.roll(slots[0], count)  # the newest slots are at the row's end
            starts = jnp.stack([0 * count, count])
            caches, x = model(tokens, caches, jaxpaged.AttentionStep.create(allocator, slots, query_starts=starts))
            logits = model.logits(x[count - 1])
            token = logits.argmax().astype(jnp.int32)
            return (caches, allocator, tokens.at[0].set(token), jnp.int32(1)), (token, logits)

        first = (cache,) * len(model.layers), allocator, jnp.asarray(PROMPT), jnp.int32(len(PROMPT))
        return jax.lax.scan(step, first, length=num_tokens)[1]

    tokens, logits = run(weights)
    return tokens.tolist(), np.asarray(logits)


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_and_tokens_of_a_saved_folder_equal_transformers(family, tmp_path):
    save_family(tmp_path, family)
    expected = EXPECTED[family]
    tokens, logits = paged_values(read_checkpoint(tmp_path), len(expected["tokens"]))
    assert tokens == expected["tokens"]
    np.testing.assert_allclose(logits[:, expected["ids"]], expected["logits"], atol=3e-5)


@pytest.mark.parametrize("family", MIXTURES)
def test_grouped_experts_equal_transformers(family, tmp_path):
    write_family(tmp_path, family)
    checkpoint, expected = read_checkpoint(tmp_path), EXPECTED[family]
    grouped = dataclasses.replace(checkpoint, config=dataclasses.replace(checkpoint.config, grouped_above=0))
    tokens, logits = paged_values(grouped, len(expected["tokens"]))
    assert tokens == expected["tokens"]
    np.testing.assert_allclose(logits[:, expected["ids"]], expected["logits"], atol=3e-5)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_published_folder_equals_a_saved_one(family, tmp_path):
    save_family(tmp_path / "saved", family)
    write_family(tmp_path / "published", family)
    saved, published = (read_checkpoint(tmp_path / form) for form in ("saved", "published"))
    assert saved.config == published.config
    assert saved.tensors.keys() == published.tensors.keys()
    assert saved.tokenizer.eos_ids == published.tokenizer.eos_ids == (SIZES["eos_token_id"],)
    assert saved.tokenizer.chat_template == published.tokenizer.chat_template


def test_without_its_window_a_model_gives_other_logits(tmp_path):
    write_family(tmp_path, "mistral")
    checkpoint = read_checkpoint(tmp_path)
    wrong = dataclasses.replace(checkpoint, config=dataclasses.replace(checkpoint.config, windows=None))
    _, logits = paged_values(wrong, 1)
    assert not np.allclose(logits[:, EXPECTED["mistral"]["ids"]], EXPECTED["mistral"]["logits"][:1], atol=0.1)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["gpt_oss", "deepseek_v2"])
def test_in_an_engine(family, tmp_path):
    write_family(tmp_path, family)
    checkpoint = read_checkpoint(tmp_path)
    model = load_model(checkpoint, "float32")
    for layer in model.layers:
        # A batch-invariant engine compiles one kind of step instead of three.
        layer.self_attn.settings = dataclasses.replace(layer.self_attn.settings, num_partitions=1)
    options = jaxpaged.EngineOptions(max_num_seqs=1, max_model_len=20, chunk_tokens=8, batch_invariant=True)
    engine = create_engine(model, checkpoint.config, options, block_size=BLOCK_SIZE, dtype="float32")
    expected = EXPECTED[family]["tokens"]
    params = jaxpaged.SamplingParams(max_tokens=len(expected), temperature=0.0)
    assert engine.generate([PROMPT], params)[0].outputs[0].token_ids == expected


@pytest.mark.slow
@pytest.mark.parametrize("scale", ["tensor", "token_head"])
def test_a_latent_of_8_bits(scale, tmp_path, run_generate):
    write_family(tmp_path, "deepseek_v3")
    options = "--cache-dtype", "int8", "--cache-scale", scale
    code, (line,), _ = run_generate(*options, model=tmp_path, prompts=["ab"], tokens=2)
    assert (code, len(line["tokens"])) == (0, 2)


def test_a_latent_in_the_memory_of_a_server(tmp_path):
    write_family(tmp_path, "deepseek_v3")
    config = read_checkpoint(tmp_path).config
    options = ["--dtype=float32", "--cache-mb=1"]
    for devices in (1, 2):
        arguments = serve.parse_arguments([*options, f"--tensor-parallel={devices}"])
        assert serve.find_capacity(config, arguments).bytes_per_token == 2 * (16 + 4) * 4


def test_weights_of_8_bits_with_block_scales(tmp_path):
    write_family(tmp_path, "deepseek_v3", quantization_config=dict(quant_method="fp8", weight_block_size=[16, 12]))
    name = "model.layers.1.self_attn.kv_b_proj.weight"
    factors = np.asarray([[1, 3], [2, 5], [0.5, 7], [4, 9]], np.float32)
    with changed_tensors(tmp_path / "model.safetensors") as tensors:
        tensors[name] = weight = tensors[name].astype(jnp.float8_e4m3fn)  # [56, 16]
        tensors[f"{name}_scale_inv"] = factors
    found = load_model(read_checkpoint(tmp_path), "float32").layers[1].self_attn
    expected = weight.astype(np.float32) * factors.repeat(16, 0).repeat(12, 1)[:56, :16]
    of_heads = np.split(expected.reshape(HEADS, PLAIN + VALUE, 16), [PLAIN], axis=1)
    for projection, of_head in zip((found.k_b_proj, found.v_b_proj), of_heads, strict=True):
        np.testing.assert_array_equal(projection.kernel[...].T, of_head.reshape(-1, 16))


def test_drafting_layers_are_skipped(tmp_path):
    def write(**changes):
        write_family(tmp_path, "deepseek_v3", **changes)
        with changed_tensors(tmp_path / "model.safetensors") as tensors:
            tensors["model.layers.2.enorm.weight"] = np.ones(32, np.float32)

    write()
    assert not [name for name in read_checkpoint(tmp_path).tensors if name.startswith("layers.2.")]
    write(num_nextn_predict_layers=0)
    with pytest.raises(CheckpointError, match="it holds 3 layers; its config says 2"):
        read_checkpoint(tmp_path)


def test_an_expert_that_is_missing(tmp_path):
    write_family(tmp_path, "deepseek_v2")
    with changed_tensors(tmp_path / "model.safetensors") as tensors:
        del tensors["model.layers.1.mlp.experts.3.up_proj.weight"]
    with pytest.raises(CheckpointError, match=r"cannot be read: 'layers.1.mlp.experts.3.up_proj.weight'"):
        load_model(read_checkpoint(tmp_path), "float32")


def make_config(family, **changes):
    return read_config(Fields(tiny_families.make_config(family, **changes)))


def test_defaults_of_missing_config_fields():
    windows = make_config("gemma3_text", num_hidden_layers=12, sliding_window_pattern=6).windows
    assert windows == (*[6] * 5, None) * 2
    assert make_config("gpt_oss", sliding_window=128).windows == make_config("gemma2", sliding_window=128).windows
    assert make_config("mistral", sliding_window=None).windows is None
    assert make_config("qwen2", use_sliding_window=None).windows is None
    assert make_config("qwen2", layer_types=["sliding_attention", "full_attention"]).windows == (6, None)
    assert make_config("qwen3", layer_types=["full_attention"] * 2, use_sliding_window=True).windows is None
    assert make_config("deepseek_v3", first_k_dense_replace=2).routing is None
    assert make_config("qwen3_moe", use_sliding_window=True, sliding_window=6).windows == (6, 6)
    assert make_config("mixtral", sliding_window=None).windows is None
    assert make_config("gemma2", final_logit_softcapping=None).final_soft_cap is None
    text = dict(hidden_size=2560, intermediate_size=10_240, num_hidden_layers=34, sliding_window=1024)
    config = read_config(Fields(dict(model_type="gemma3", text_config=text)))
    assert (config.num_heads, config.num_kv_heads, config.head_dim, config.vocab_size) == (8, 4, 256, 262_208)
    assert config.windows == ((*[1024] * 5, None) * 6)[:34]
    assert config.tie_embeddings


def test_the_layers_and_shares_of_qwen3_moe():
    def routing(**changes):
        return make_config("qwen3_moe", num_hidden_layers=4, **changes).routing

    assert routing().dense_layers == (0, 2)
    assert routing(mlp_only_layers=[2, 3]).dense_layers == (0, 2, 3)
    assert routing(mlp_only_layers=[0], decoder_sparse_step=1).dense_layers == (0,)
    assert routing(decoder_sparse_step=5) is None
    fields = tiny_families.make_config("qwen3_moe")
    renamed = fields | dict(num_local_experts=fields.pop("num_experts"))  # as transformers 5 saves it
    assert read_config(Fields(renamed)) == make_config("qwen3_moe")
    assert routing().normalise
    assert not routing(norm_topk_prob=False).normalise


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
            dict(quantization_config=dict(quant_method="awq")),
            "its quantization_config is of the method 'awq'",
        ),
        ("deepseek_v2", dict(quantization_config=dict(quant_method="fp8")), "is of the method 'fp8'"),
        ("llama", dict(quantization_config=dict(quant_method="mxfp4")), "is of the method 'mxfp4'"),
        ("llama", dict(quantization_config="fp8"), "expected a JSON object; got 'fp8'"),
        ("llama", dict(partial_rotary_factor=0.5), "its partial_rotary_factor is 0.5, which is not known here"),
        ("llama", dict(rope_scaling=dict(partial_rotary_factor=0.5)), "its partial_rotary_factor is 0.5"),
        ("llama", dict(rope_scaling=dict(mrope_section=[1, 1, 2])), "its mrope_section is"),
        ("mistral", dict(layer_types=["full_attention"] * 2), "its layer_types is"),
        ("gpt_oss", dict(layer_types=["full_attention", "x"]), "layer_types must be 2 of sliding_attention"),
        ("gpt_oss", dict(layer_types=["full_attention"]), "layer_types must be 2 of sliding_attention, full_attention"),
        ("gpt_oss", dict(num_experts_per_tok=5), "num_experts_per_tok must be a whole number from 1 to 4; got 5"),
        ("gpt_oss", dict(num_local_experts=None), "num_local_experts"),
        ("gpt_oss", dict(sliding_window=None), "sliding_window"),
        ("gpt_oss", dict(sliding_window=0), "sliding_window must be a whole number from 1"),
        ("mixtral", dict(num_experts_per_tok=5), "num_experts_per_tok must be a whole number from 1 to 4; got 5"),
        ("mixtral", dict(moe_intermediate_size=9), "its moe_intermediate_size is 9, which is not known here; if"),
        ("qwen3_moe", dict(num_experts=0), "num_experts must be a whole number from 1 to 4096; got 0"),
        ("qwen3_moe", dict(decoder_sparse_step=0), "decoder_sparse_step must be a whole number from 1"),
        ("qwen3_moe", dict(mlp_only_layers=[True]), "Field 'mlp_only_layers' with value [True]"),
        ("qwen3_moe", dict(shared_expert_intermediate_size=9), "its shared_expert_intermediate_size is 9, which is"),
        ("deepseek_v2", dict(norm_topk_prob=True), "its norm_topk_prob is True, which is not known here"),
        ("deepseek_v2", dict(topk_method="noaux_tc"), "its topk_method is 'noaux_tc'; known here are greedy, group"),
        ("deepseek_v3", dict(scoring_func="softmax"), "its scoring_func is softmax, which is not known here"),
        ("deepseek_v3", dict(n_group=3), "its 8 experts do not go evenly into 3 groups"),
        ("deepseek_v3", dict(kv_lora_rank=None), "kv_lora_rank"),
        ("gemma2", dict(hidden_activation="gelu"), "it has the activation 'gelu'"),
        ("gemma2", dict(attn_logit_softcapping=0), "attn_logit_softcapping must be a number from 0.001"),
        ("gemma2", dict(query_pre_attn_scalar="8"), "query_pre_attn_scalar must be a number from 0.001"),
        ("gemma3_text", dict(sliding_window_pattern=0), "sliding_window_pattern must be a whole number from 1"),
        ("gemma3_text", dict(rope_scaling=dict(rope_type="yarn", factor=4.0)), "factor"),
        # transformers would not scale
        ("gemma3_text", dict(rope_scaling=dict(type="linear", factor=8.0)), "and the type next to it 'linear'; delete"),
        ("llama", dict(rope_scaling=dict(rope_type="yarn", factor=1e9)), "* factor must be a whole number"),
        ("llama", dict(rope_scaling=dict(rope_type="yarn")), "Missing required keys in `rope_parameters`"),
        ("llama", dict(rope_scaling=dict(rope_type="longrope")), "scaled by 'longrope', which is not known here"),
        ("llama", dict(model_type="gpt2"), "it is of the type 'gpt2'; known here are llama, "),
        ("llama", dict(scale_depth=2.0), "here; if it changes no result, delete it from config.json"),
        ("llama", dict(attn_logit_softcapping=50.0), "its attn_logit_softcapping is 50.0, which is not known here; if"),
        ("llama", dict(per_layer_config={"0": {}}), "its per_layer_config is {'0': {}}, which is not known here; if"),
        ("llama", dict(transformers_weights="other"), "its transformers_weights is other, which is not known here; if"),
        (
            "llama",
            dict(rope_scaling=dict(rope_type="linear", factor=2.0, alpha=3.0)),
            "its alpha is 3.0, which",
        ),
        (
            "qwen2",
            dict(dual_chunk_attention_config=5),
            "its dual_chunk_attention_config is 5, which is not known",
        ),
        ("deepseek_v2", dict(num_experts=8), "its num_experts is 8, which is not known here; if"),
        (
            "gemma3_text",
            dict(rope_parameters=dict(rope_type="linear")),
            "its rope_type is linear, which",
        ),  # no type
        (
            "gemma3",
            dict(text_config=dict(altup_num_inputs=4)),
            "its altup_num_inputs is 4, which is not known",
        ),
        ("gemma3", dict(text_config={}, audio_config=5), "its audio_config is 5, which is not known here; if"),
    ],
)
def test_unsupported_features_are_refused_by_name(family, changes, message):
    with pytest.raises((KeyError, ValueError)) as error:
        make_config(family, **changes)
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_published_fields_without_effect(tmp_path):
    files = dict(_name_or_path="x", architectures=["LlamaForCausalLM"], torch_dtype="bfloat16", pad_token_id=0)
    training = dict(attention_dropout=0.0, initializer_range=0.02, use_cache=True, unsloth_fixed=True)
    of_generation = dict(temperature=0.6, cache_implementation="hybrid", max_length=20)
    plain = make_config("llama")
    smollm2 = dict(is_llama_config=True, rope_interleaved=False)
    assert make_config("llama", **files, **training, **of_generation, **smollm2, num_labels=10**9) == plain
    assert make_config("llama", use_mrope=False, sliding_window=None) == plain
    gpt_oss = dict(experts_per_token=2, initial_context_length=16, router_aux_loss_coef=0.9)
    assert make_config("gpt_oss", **gpt_oss) == make_config("gpt_oss")
    qwen3_moe = dict(max_window_layers=48, use_sliding_window=False, sliding_window=None, output_router_logits=False)
    assert make_config("qwen3_moe", **qwen3_moe) == make_config("qwen3_moe")
    v3 = dict(scoring_func="sigmoid", topk_method="noaux_tc", moe_layer_freq=1, aux_loss_alpha=0.001, seq_aux=True)
    assert make_config("deepseek_v3", **v3, ep_size=1) == make_config("deepseek_v3")
    assert make_config("gemma2", sliding_window_size=9, hidden_act="gelu") == make_config("gemma2")


def test_yarn_of_a_readme_in_a_folder_that_transformers_saved(caplog):
    """rope_scaling replaces rope_parameters, as AutoConfig reads it, with its own theta or the config's."""
    saved = dict(rope_parameters=dict(rope_type="default", rope_theta=500.0), rope_theta=None)
    yarn = dict(rope_type="yarn", factor=4.0, original_max_position_embeddings=32)
    expected = make_config("qwen3", rope_scaling=yarn)
    assert expected.context == 128  # max_position_embeddings is 64
    assert make_config("qwen3", **saved, rope_scaling=yarn | dict(rope_theta=500.0)) == expected
    assert make_config("qwen3", **saved | dict(rope_theta=500.0), rope_scaling=yarn) == expected
    assert not caplog.records
    assert make_config("qwen3", **saved, rope_scaling=yarn) == make_config("qwen3", rope_theta=1e4, rope_scaling=yarn)
    assert "rope_theta is 10000 instead of 500; write it into rope_scaling" in caplog.text


def test_the_context_of_yarn():
    yarn = dict(rope_type="yarn", factor=4.0)
    assert make_config("llama", rope_scaling=yarn).context == 4 * 64
    for original, factor, context in ((16, 2.5, 40), (4096, 32.0, 131_072), (1, 1.0, 1)):
        of_training = yarn | dict(factor=factor, original_max_position_embeddings=original)
        assert make_config("llama", rope_scaling=of_training).context == context
    assert make_config("llama", rope_scaling=dict(rope_type="linear", factor=4.0)).context == 64


@pytest.mark.parametrize("family", FAMILIES)
def test_a_wrong_value_of_any_field_is_harmless_or_refused_in_one_clause(family):
    config = tiny_families.make_config(family)
    scaling = config.get("rope_scaling", tiny_families.LLAMA3)
    names = {*config, *AutoConfig.for_model(family).to_dict(), "rope_scaling", "rope_parameters", "per_layer_config"}
    changes = [(name, value, {name: value}) for name in names for value in WRONG]
    changes += [(name, value, {"rope_scaling": scaling | {name: value}}) for name in scaling for value in WRONG]
    accepted: dict[str, list] = {}
    for name, value, change in changes:
        try:
            read_config(Fields(config | change))
            accepted.setdefault(name, []).append(value)
        except (KeyError, ValueError) as error:
            assert len(one_line(error)) < 400, change  # noqa: PT017 (of many)
    if family == "llama":  # eos_token_id is read with the tokenizer
        of_model = {*config, *scaling, "attention_bias", "mlp_bias"} - {"eos_token_id"}
        assert {name: values for name, values in accepted.items() if name in of_model} == HARMLESS


def test_no_code_of_a_folder_runs(tmp_path):
    write_family(tmp_path, "llama", auto_map={"AutoConfig": "mine.Config"})
    (tmp_path / "mine.py").write_text("raise SystemExit('it ran')")
    read_checkpoint(tmp_path)
    file = tmp_path / "tokenizer_config.json"
    own = {"auto_map": {"AutoTokenizer": ["mine.Slow", "mine.Fast"]}}
    file.write_text(json.dumps(json.loads(file.read_text()) | own))
    with pytest.raises(CheckpointError, match="contains custom code"):
        read_checkpoint(tmp_path)


def test_a_refusal_is_one_sentence(tmp_path):
    write_family(tmp_path, "llama", partial_rotary_factor=0.5)
    with pytest.raises(CheckpointError) as error:
        read_checkpoint(tmp_path)
    assert str(error.value).endswith(": its partial_rotary_factor is 0.5, which is not known here.")


def test_experts_in_four_bits(tmp_path):
    write_family(tmp_path, "gpt_oss", quantization_config={"quant_method": "mxfp4"})
    name = "model.layers.1.mlp.experts.gate_up_proj"
    blocks, scales, expected = (np.asarray(array) for array in EXPECTED["mxfp4"].values())
    with changed_tensors(tmp_path / "model.safetensors") as tensors:
        shape = tensors.pop(name).shape
        tensors[f"{name}_blocks"] = np.broadcast_to(blocks.astype(np.uint8), (shape[0], shape[2], 1, 16)).copy()
        tensors[f"{name}_scales"] = np.broadcast_to(scales.astype(np.uint8), (shape[0], shape[2], 1)).copy()
    found = load_model(read_checkpoint(tmp_path), "float32").layers[1].mlp.experts.gate_up_proj[...]
    np.testing.assert_array_equal(found.swapaxes(1, 2), np.broadcast_to(expected[:, None], shape))
