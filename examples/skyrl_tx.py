"""Runs the generator of SkyRL tx on a `jaxpaged.Engine`, and compares its greedy tokens with tx's own, on a CPU.

    pip install "skyrl[jax,tinker]"
    python examples/skyrl_tx.py

For tx's JAX backend, assign the method before the first sample; neither tx nor its model is edited:

    Qwen3ForCausalLM.generate = engine_generate(max_model_len=4096)

In your own loop, `EngineGenerator(model, 4096).generate(...)` has the arguments and the result of `model.generate`.
"""

import dataclasses
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import jaxpaged
import jaxpaged.nnx
from lib.caches import create_caches
from lib.extras import imports

with imports(__doc__):
    from skyrl.tinker.types import SamplingParams
    from skyrl.tx.layers.rotary_embedding import apply_rope
    from skyrl.tx.models.configs import ModelConfig
    from skyrl.tx.models.llama3 import Llama3Attention, Llama3ForCausalLM
    from skyrl.tx.models.qwen3 import Qwen3Attention, Qwen3ForCausalLM
    from skyrl.tx.utils.generator import GenerateOutput, KVCache, find_string_stop_position
    from skyrl.tx.utils.models import is_stacked_path
    from transformers import Qwen3Config

ATTENTIONS = {Qwen3ForCausalLM: Qwen3Attention, Llama3ForCausalLM: Llama3Attention}
OPTIONS = jaxpaged.EngineOptions(max_num_seqs=64, prefix_cache=True)


def attention(
    a: Any, x: jax.Array, *, attention_mask: Any, positions: Any, adapter_indices: Any, kv_cache: tuple[Any, Any]
) -> tuple[jax.Array, tuple[Any, Any]]:
    """Replaces `Qwen3Attention.__call__` and `Llama3Attention.__call__`; x is `[tokens, 1, features]`.

    `paged` passes the layer's cache and the step as tx's pair of keys and values.
    """
    del attention_mask  # the step has the lengths
    cache, step = kv_cache
    if isinstance(a, Qwen3Attention):
        projected = a.qkv_proj(x, adapter_indices=adapter_indices)
    else:
        projected = tuple(proj(x, adapter_indices=adapter_indices) for proj in (a.q_proj, a.k_proj, a.v_proj))
    q, k, v = (y.reshape(*x.shape[:2], -1, a.head_dim) for y in projected)
    if isinstance(a, Qwen3Attention):
        q, k = a.q_norm(q), a.k_norm(k)
    q, k = (apply_rope(y, positions, a.head_dim, a.config.rope_parameters["rope_theta"]) for y in (q, k))
    cache, out = step.attend(q[:, 0], k[:, 0], v[:, 0], cache)
    return a.o_proj(out.reshape(*x.shape[:2], -1), adapter_indices=adapter_indices), (cache, step)


def paged(model: Any) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """`apply` and `head` of a tx model, for weights from `EngineGenerator`: the states of the layers, and the rest.

    A token is a sequence in tx's decode mode, which has one adapter for each sequence.
    """
    graph, attention_type = nnx.graphdef(model), ATTENTIONS[type(model)]
    has_adapters = model.config.max_lora_adapters > 0

    def apply(weights: Any, tokens: Any, positions: Any, caches: Any, step: Any) -> tuple[Any, Any]:
        layers, rest = weights
        # Each model has one layer in place of its stack.
        models = [jaxpaged.nnx.replace(nnx.merge(graph, layer, rest), attention_type, attention) for layer in layers]
        graphs, states = zip(*(nnx.split(model.model.layers._stacked) for model in models), strict=True)
        adapters = jnp.maximum(step.adapters, 0) if has_adapters else None  # -1: padding
        outputs = models[0](
            tokens[:, None],
            attention_mask=None,
            positions=positions[:, None],
            adapter_indices=adapters,
            kv_cache=KVCache(keys=list(caches), values=[step] * len(layers), cache_position=positions),
            decode_layers=(graphs[0], states),
        )
        return tuple(outputs.kv_cache.keys), (outputs.last_hidden_state[:, 0], adapters)

    def head(weights: Any, hidden: Any) -> Any:
        layers, rest = weights
        x, adapters = hidden
        return nnx.merge(graph, layers[0], rest).compute_logits(x[:, None], adapters)[:, 0]

    return apply, head


class EngineGenerator:
    """tx's generator on a `jaxpaged.Engine`, for Qwen3 and Llama 3 models on one device.

    tx stacks the weights of its layers. The engine holds a copy with an array for each layer, as tx's own generator
    makes in each call. `update_weights` copies only the stacks that have changed: in LoRA training, the adapters.

    Args:
        model: `Qwen3ForCausalLM` or `Llama3ForCausalLM`, with or without adapters and experts.
        max_model_len: the most tokens of a prompt and its completion.
        block_size: tokens per block.
        options: options of the engine. `max_num_seqs` completions run at once; the other requests wait.
    """

    def __init__(
        self, model: Any, max_model_len: int, *, block_size: int = 16, options: jaxpaged.EngineOptions = OPTIONS
    ):
        if type(model) not in ATTENTIONS:
            names = " and ".join(model_type.__name__ for model_type in ATTENTIONS)
            raise ValueError(f"EngineGenerator runs {names}; got {type(model).__name__}. Write an attention for it.")
        if (num_devices := max(len(x.sharding.device_set) for x in jax.tree.leaves(nnx.state(model)))) > 1:
            raise ValueError(f"EngineGenerator runs models on one device; got weights on {num_devices} devices.")
        config = model.config
        self._has_adapters = config.max_lora_adapters > 0
        self._slices: dict[int, tuple[jax.Array, list[jax.Array]]] = {}  # by the id of the stack, which it keeps alive
        weights = self._weights(model)
        self._arrays = jax.tree.leaves(nnx.state(model))
        caches = create_caches(
            options,
            max_model_len,
            num_layers=config.num_hidden_layers,
            block_size=block_size,
            num_kv_heads=config.num_key_value_heads,
            head_dim=getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads,
            dtype=model.model.embed_tokens.embedding[...].dtype,
        )
        options = dataclasses.replace(
            options,
            vocab_size=config.vocab_size,
            max_model_len=max_model_len,
            num_adapters=config.max_lora_adapters,
        )
        apply, head = paged(model)
        self.engine = jaxpaged.Engine(apply, weights, caches, head=head, options=options)

    def update_weights(self, model: Any) -> None:
        """Updates the engine's weights if any array of the model is a different object than in the last call."""
        arrays = jax.tree.leaves(nnx.state(model))
        if any(new is not old for new, old in zip(arrays, self._arrays, strict=True)):
            self.engine.update_weights(self._weights(model))
            self._arrays = arrays

    def generate(
        self,
        input_ids: jax.Array,
        attention_mask: jax.Array,
        *,
        sampling_params: Sequence[SamplingParams],
        adapter_indices: jax.Array | None = None,
        prompt_logprobs: bool = False,
        tokenizer: Any = None,
    ) -> GenerateOutput:
        """Replaces `GeneratorMixin.generate`. An empty prompt, with which tx's backend pads a batch, has no tokens."""
        mask = np.asarray(attention_mask) != 0
        lengths = mask.sum(axis=1)
        if not np.array_equal(mask, np.arange(mask.shape[1]) < lengths[:, None]):
            raise ValueError("attention_mask must be 1 for a prompt's tokens and then 0; got padding before a token.")
        if len(sampling_params) != len(mask):
            raise ValueError(
                f"sampling_params must be one for each prompt; got {len(sampling_params)}, not {len(mask)}."
            )
        if tokenizer is None and any(params.stop_strings for params in sampling_params):
            raise ValueError("stop_strings need the tokenizer; got tokenizer=None.")
        if self._has_adapters and adapter_indices is None:
            raise ValueError(
                "the model has adapters, and got adapter_indices=None. Pass the index of each prompt's adapter; tx's "
                "backend samples from the base model with adapter 0."
            )
        adapters = np.asarray(adapter_indices).tolist() if self._has_adapters else [None] * len(mask)
        rows = np.flatnonzero(lengths).tolist()
        outputs = self.engine.generate(
            [np.asarray(input_ids)[i, : lengths[i]].tolist() for i in rows],
            [engine_params(sampling_params[i], adapters[i], prompt_logprobs) for i in rows],
        )
        result = GenerateOutput([[] for _ in mask], ["length"] * len(mask), [[] for _ in mask])
        result.prompt_logprobs = [[] for _ in mask] if prompt_logprobs else None
        for i, output in zip(rows, outputs, strict=True):
            [completion] = output.outputs
            assert completion.logprobs is not None
            tokens, stop_reason = completion.token_ids, completion.finish_reason
            end = find_string_stop_position(tokens, tokenizer, sampling_params[i].stop_strings)
            result.generated_ids[i] = tokens[:end]
            result.logprobs[i] = completion.logprobs[:end]
            result.stop_reasons[i] = stop_reason if end is None else "stop"
            if output.prompt_logprobs is not None:
                result.prompt_logprobs[i] = output.prompt_logprobs[1:]
        return result

    def _weights(self, model: Any) -> tuple[Any, Any]:
        """The states of the layers, and the state of the rest."""
        stacked, rest = nnx.state(model, lambda path, _: is_stacked_path(path), ...)
        stacks, tree = jax.tree.flatten(stacked)
        self._slices = {id(x): self._slices.get(id(x)) or (x, unstack(x)) for x in stacks}
        layers = zip(*(self._slices[id(x)][1] for x in stacks), strict=True)
        return tuple(jax.tree.unflatten(tree, layer) for layer in layers), rest


unstack = jax.jit(jnp.unstack)


def engine_params(params: SamplingParams, adapter: int | None, prompt_logprobs: bool) -> jaxpaged.SamplingParams:
    return jaxpaged.SamplingParams(
        max_tokens=params.max_tokens,
        temperature=params.temperature,
        top_k=max(params.top_k, 0),
        top_p=params.top_p,
        seed=params.seed % 2**32,
        stop_token_ids=tuple(params.stop_tokens or ()),
        logprobs=True,
        prompt_logprobs=prompt_logprobs,
        adapter=adapter,
    )


def engine_generate(max_model_len: int, **options: Any) -> Callable[..., GenerateOutput]:
    """A method `generate` for a tx model class.

    The first call makes an `EngineGenerator` with these options. Later calls, also of other objects, run on its engine:
    tx's backend makes an object for each batch, with the same structure and the newest weights.
    """
    generator: EngineGenerator | None = None

    def generate(model: Any, *args: Any, **kwargs: Any) -> GenerateOutput:
        nonlocal generator
        if generator is None:
            generator = EngineGenerator(model, max_model_len, **options)
        generator.update_weights(model)
        return generator.generate(*args, **kwargs)

    return generate


SIZES: dict[str, Any] = dict(
    num_hidden_layers=2,
    vocab_size=64,
    hidden_size=32,
    intermediate_size=64,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
)


def small_model() -> Qwen3ForCausalLM:
    config = ModelConfig(Qwen3Config(**SIZES), max_lora_adapters=0, max_lora_rank=1, shard_attention_heads=True)
    return Qwen3ForCausalLM(config, dtype=jnp.float32, rngs=nnx.Rngs(0))


def one_device() -> jax.sharding.Mesh:
    """tx's mesh on one device, for `jax.set_mesh`."""
    return jax.make_mesh((1, 1, 1), ("fsdp", "ep", "tp"), axis_types=(jax.sharding.AxisType.Auto,) * 3)


def main() -> None:
    rng, lengths = np.random.default_rng(0), np.array([32, 5, 17, 1])
    mask = (np.arange(32) < lengths[:, None]).astype(np.int32)
    input_ids = mask * rng.integers(0, 64, mask.shape, np.int32)
    params = [SamplingParams(temperature=0.0, max_tokens=n, seed=0) for n in (8, 64, 16, 32)]
    with jax.set_mesh(one_device()):
        model, results = small_model(), {}
        generator = EngineGenerator(model, 96, options=jaxpaged.EngineOptions(max_num_seqs=4))
        for name, generate in {"tx": model.generate, "engine": generator.generate}.items():
            for _ in range(2):  # the first call compiles
                start = time.perf_counter()
                results[name] = generate(input_ids, mask, sampling_params=params)
                seconds = time.perf_counter() - start
            print(f"{name}: {seconds:.3f} s")
    tx, engine = results["tx"], results["engine"]
    assert engine.generated_ids == tx.generated_ids
    error = np.abs(np.concatenate(engine.logprobs) - np.concatenate(tx.logprobs)).max()
    print(f"equal tokens; the logprobs differ by at most {error:.1e}")


if __name__ == "__main__":
    main()
