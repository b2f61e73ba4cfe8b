"""Names that are not dtypes, for every dtype argument."""

import dataclasses

import jax.numpy as jnp
import pytest

import jaxpaged
from jaxpaged import AttentionSettings, KVCache, LatentSettings, SamplingParams

SIZES = dict(num_kv_heads=1, head_dim=8)
PAGED = AttentionSettings(num_heads=1, **SIZES, rotary_frequencies=None)
LATENT = LatentSettings(
    num_heads=1,
    kv_lora_rank=8,
    qk_nope_head_dim=4,
    qk_rope_head_dim=2,
    v_head_dim=4,
    q_lora_rank=None,
    rotary_frequencies=(1.0,),
)
CALLS = {
    "KVCache.create": lambda dtype: KVCache.create(num_blocks=2, block_size=8, **SIZES, dtype=dtype),
    "cache_capacity": lambda dtype: jaxpaged.cache_capacity(10**6, [8], num_layers=1, **SIZES, dtype=dtype),
    "generate": lambda dtype: jaxpaged.generate(
        None, None, [[1]], SamplingParams(), head=None, num_layers=1, **SIZES, dtype=dtype
    ),
    "kv_scale": lambda dtype: jaxpaged.ops.kv_scale(jnp.ones((2, 8)), dtype, "head"),
    "widen_kv": lambda dtype: jaxpaged.ops.widen_kv(KVCache.create(num_blocks=2, block_size=8, **SIZES), dtype),
    "AttentionSettings": lambda dtype: dataclasses.replace(PAGED, dtype=dtype),
    "AttentionSettings, parameters": lambda dtype: dataclasses.replace(PAGED, param_dtype=dtype),
    "LatentSettings": lambda dtype: dataclasses.replace(LATENT, dtype=dtype),
    "LatentSettings, parameters": lambda dtype: dataclasses.replace(LATENT, param_dtype=dtype),
}


@pytest.mark.parametrize("dtype", ["bf16", "fp8"])
@pytest.mark.parametrize("name", CALLS)
def test_the_error_quotes_the_name_and_suggests_valid_ones(name, dtype):
    right = "float8_e4m3fn" if name == "kv_scale" else "bfloat16"
    with pytest.raises(ValueError, match=rf"dtype must be .*{right}.*; got (param_)?dtype='{dtype}'"):
        CALLS[name](dtype)
