"""Runs an unmodified Flax NNX model, the Qwen3 of Tunix, with a paged cache.

    pip install google-tunix
    python examples/tunix_qwen3.py

`attention` replaces the model's attention, and `paged` separates the model's layers from its head. The model here is
small, with random weights; `tunix.models.qwen3.params` loads real ones.
"""

from typing import Any

from flax import nnx

import jaxpaged
import jaxpaged.nnx
from lib.extras import imports

with imports(__doc__):
    from tunix.models.qwen3.model import Attention, ModelConfig, Qwen3, apply_rope


def attention(a: Attention, x: Any, positions: Any, cache: Any, step: Any, segment_ids: Any = None) -> tuple[Any, Any]:
    """Replaces `Attention.__call__`. `paged` passes the step in place of the attention mask."""
    q, k = (apply_rope(x, positions, a.head_dim) for x in (a.q_norm(a.q_proj(x)), a.k_norm(a.k_proj(x))))
    cache, out = step.attend(q, k, a.v_proj(x), cache)
    return cache, a.o_proj(out)


def paged(model: Qwen3) -> tuple[Any, nnx.State, Any]:
    """The model without its head, its weights, and the head, for `jaxpaged.generate` and `jaxpaged.Engine`."""
    graph, weights = nnx.split(model)

    def apply(weights: Any, tokens: Any, positions: Any, caches: Any, step: Any) -> tuple[Any, Any]:
        model = jaxpaged.nnx.replace(nnx.merge(graph, weights), Attention, attention)
        x, new_caches = model.embedder.encode(tokens[None]), []
        for layer, cache in zip(model.layers, caches, strict=True):
            cache, x = layer(x, positions[None], cache, step)
            new_caches.append(cache)
        return tuple(new_caches), model.final_norm(x)[0]

    def head(weights: Any, x: Any) -> Any:
        model = nnx.merge(graph, weights)
        logits = model.embedder.decode(x[None]) if model.config.use_tied_embedding else model.lm_head(x[None])
        return logits[0].astype("float32")

    return apply, weights, head


def small_model() -> Qwen3:
    config = ModelConfig(
        num_layers=2,
        vocab_size=64,
        embed_dim=32,
        hidden_dim=64,
        num_heads=4,
        head_dim=16,
        num_kv_heads=2,
        rope_theta=1_000_000,
        norm_eps=1e-6,
    )
    return Qwen3(config, rngs=nnx.Rngs(0))


def main() -> None:
    apply, weights, head = paged(small_model())
    params = jaxpaged.SamplingParams(max_tokens=8, temperature=0)
    sizes: dict[str, Any] = dict(num_layers=2, num_kv_heads=2, head_dim=16, dtype="float32")
    for output in jaxpaged.generate(apply, weights, [[3, 1, 4], [1, 5]], params, head=head, **sizes):
        print(output.outputs[0].token_ids)


if __name__ == "__main__":
    main()
