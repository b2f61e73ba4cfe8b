"""Runs an unmodified Flax Linen model, Google DeepMind's Gemma 3, with a paged cache.

    pip install gemma
    python examples/gemma_linen.py

`attention` replaces the model's attention (sliding windows, norms of q and k, two rotary bases), and `hidden` runs the
model without its head. The model here is small, with random weights; `gemma.gm.ckpts` loads real ones.
"""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

import jaxpaged
import jaxpaged.linen
from lib.extras import imports

with imports(__doc__):
    from gemma.gm.math._positional_embeddings import apply_rope
    from gemma.gm.nn import _config, _modules, _transformer

LOCAL, GLOBAL = _modules.AttentionType.LOCAL_SLIDING, _modules.AttentionType.GLOBAL


def attention(a: Any, x: Any, positions: Any, cache: Any, step: Any) -> tuple[Any, Any]:
    """Replaces `Attention.__call__`. `hidden` passes the step in place of the attention mask."""
    q, (k, v) = a.q_einsum("BTD,NDH->BTNH", x), a.kv_einsum("BSD,CKDH->CBSKH", x)
    rope = dict(base_frequency=a.rope_base_frequency, scale_factor=a.rope_scale_factor)
    q, k = apply_rope(a._query_norm(q), positions, **rope), apply_rope(a._key_norm(k), positions, **rope)
    window = a.sliding_window_size if a.attn_type == LOCAL else None
    cache, out = step.attend(q, k, v, cache, scale=a.query_pre_attn_scalar, sliding_window=window)
    return cache, a.attn_vec_einsum("BTNH,NHD->BTD", out)


def hidden(model: Any, tokens: Any, positions: Any, caches: Any, step: Any) -> tuple[Any, Any]:
    inputs = _transformer._Inputs(model.embedder.encode(tokens[None]), positions[None], step, None)
    x, layers = model._apply_attention(inputs, {f"layer_{i}": cache for i, cache in enumerate(caches)})
    return tuple(layers.values()), x[0]


def paged(model: Any) -> tuple[Any, Any]:
    """The model without its head, and the head, for `jaxpaged.generate` and `jaxpaged.Engine`. Both accept the
    variables of `model.init`."""
    apply = jaxpaged.linen.replace(_modules.Attention, attention)(nn.apply(hidden, model))
    return apply, nn.apply(lambda model, x: model.embedder.decode(x), model)


def small_model() -> Any:
    config = _config.TransformerConfig(
        num_embed=64,
        embed_dim=32,
        hidden_dim=64,
        num_heads=4,
        head_dim=16,
        num_kv_heads=2,
        final_logit_softcap=None,
        use_post_attn_norm=True,
        use_post_ffw_norm=True,
        attention_types=(LOCAL, GLOBAL),
        sliding_window_size=4,
        use_qk_norm=True,
        global_base_frequency=1_000_000,
    )
    return _transformer.Transformer(config=config, dtype=jnp.float32)


def main() -> None:
    model = small_model()
    weights = model.init(jax.random.key(0), jnp.zeros((1, 1), jnp.int32))
    params = jaxpaged.SamplingParams(max_tokens=8, temperature=0)
    sizes: dict[str, Any] = dict(num_layers=2, num_kv_heads=2, head_dim=16, dtype="float32")
    apply, head = paged(model)
    for output in jaxpaged.generate(apply, weights, [[3, 1, 4], [1, 5]], params, head=head, **sizes):
        print(output.outputs[0].token_ids)


if __name__ == "__main__":
    main()
