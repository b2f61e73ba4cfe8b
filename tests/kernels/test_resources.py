"""What ptxas makes of the kernels for GPUs that are not there: registers, spills and shared memory do not creep up.

Optional: skipped where the wheels are missing that `make test-ptxas` installs.
"""

import pytest

from tests.kernels import resources

pytestmark = pytest.mark.skipif(not resources.installed(), reason="no ptxas: run make test-ptxas")

SMEM_OF_ONE = 227 * 1024  # bytes, of a program that has a SM to itself
E4M3 = dict(cache_dtype="float8_e4m3fn", scales=("token_head", "token_head"))

# Of the prefill kernel: the most bytes that are spilled and read back. Its 384 threads start with 168 registers each;
# those that compute take 232 once the others have given theirs up. With an 8-bit cache 512 threads start with 128, and
# those that compute take 216.
ALL_OPTIONS = ("sliding_window", "logits_soft_cap", "alibi_slopes", "sinks")
PREFILL = {
    "prefill": (dict(), 0),
    "prefill of float16": (dict(dtype="float16"), 0),
    "prefill, group 1": (dict(group=1), 0),
    "prefill, group 16": (dict(group=16), 0),
    "prefill, blocks of 128": (dict(block_size=128), 0),
    "prefill, a window": (dict(options=("sliding_window",)), 0),
    "prefill, all options": (dict(options=ALL_OPTIONS), 0),
    "prefill, parts": (dict(num_parts=3), 0),
    "prefill, head_dim 64": (dict(head_dim=64), 0),
    "prefill, head_dim 64, all options": (dict(head_dim=64, options=ALL_OPTIONS), 0),
    "prefill, head_dim 96": (dict(head_dim=96), 0),
    "prefill, head_dim 192": (dict(head_dim=192), 32),
    "prefill, head_dim 256": (dict(head_dim=256), 400),
    "prefill, float8_e4m3fn, scales of heads": (E4M3 | dict(scales=("head", "head")), 20),
    "prefill, float8_e4m3fn": (E4M3, 20),
    "prefill, float8_e4m3fn, head_dim 64": (E4M3 | dict(head_dim=64), 40),
    "prefill, float8_e4m3fn, head_dim 192": (E4M3 | dict(head_dim=192), 200),
}


LATENT_INT8 = dict(kv_heads=1, group=16, head_dim=640, value_dim=512, is_latent=True, block_size=64)
LATENT_INT8 |= dict(cache_dtype="int8", scales=("token_head", "token_head"))

# Of the decode kernel: the most registers on any GPU, and the most bytes that are spilled and read back. With
# 128 threads a program, 255 registers let two programs share a SM.
DECODE = {
    "plain": (dict(), 160, 0),
    "16 heads": (dict(group=16), 200, 0),
    "64 heads": (dict(group=64), 255, 376),
    "head_dim 80": (dict(head_dim=80), 160, 0),
    "head_dim 256": (dict(head_dim=256), 208, 0),
    "4 tokens, all options": (dict(q_len=4, options=ALL_OPTIONS), 216, 0),
    "a plan": (dict(total_partitions=5), 160, 0),
    "64 heads, a plan": (dict(group=64, total_partitions=5), 255, 184),
    "float8_e5m2": (E4M3 | dict(cache_dtype="float8_e5m2"), 160, 0),
    "int8, a latent with rotary numbers in two": (LATENT_INT8, 240, 0),
}


@pytest.fixture(scope="module", params=resources.GPUS)
def decode(request):
    return request.param, resources.compiled(request.param, {name: shape for name, (shape, *_) in DECODE.items()})


@pytest.mark.parametrize("name", DECODE)
def test_decode_fits(decode, name):
    gpu, compiled = decode
    _, registers, spill_bytes = DECODE[name]
    for its in compiled[name].values():
        assert its["registers"] <= registers
        assert its["spill_bytes"] <= spill_bytes
        assert its["smem_bytes"] <= resources.program_smem(gpu)


@pytest.fixture(scope="module")
def prefill():
    return resources.compiled(
        resources.H100, {name: shape | dict(kernel="prefill") for name, (shape, _) in PREFILL.items()}
    )


@pytest.mark.parametrize("name", PREFILL)
def test_prefill_fits(prefill, name):
    its = prefill[name]["paged_prefill"]
    assert its["registers"] <= 168
    assert its["spill_bytes"] <= PREFILL[name][1]
    assert its["smem_bytes"] <= SMEM_OF_ONE


# Of the portable prefill kernel, whose threads take all registers there are: the most bytes that are spilled and read
# back on any GPU. On Ampere and Ada they are 24 at most, with an 8-bit cache 596; Blackwell's ptxas spills most.
PORTABLE_PREFILL = {
    "portable": (dict(), 420),
    "portable, all options": (dict(options=ALL_OPTIONS), 1100),
    "portable, head_dim 64": (dict(head_dim=64), 0),
    "portable, head_dim 256": (dict(head_dim=256), 600),
    "portable, float8_e5m2": (E4M3 | dict(cache_dtype="float8_e5m2"), 1840),
}


@pytest.fixture(scope="module", params=resources.GPUS)
def portable_prefill(request):
    shapes = {name: shape | dict(kernel="portable_prefill") for name, (shape, _) in PORTABLE_PREFILL.items()}
    return request.param, resources.compiled(request.param, shapes)


@pytest.mark.parametrize("name", PORTABLE_PREFILL)
def test_portable_prefill_fits(portable_prefill, name):
    gpu, compiled = portable_prefill
    its = compiled[name]["portable_prefill"]
    assert its["spill_bytes"] <= PORTABLE_PREFILL[name][1]
    assert its["smem_bytes"] <= resources.program_smem(gpu)


LATENT = {"128 heads": dict(), "64 heads, 3 partitions, blocks of 16": dict(heads=64, num_partitions=3, block_size=16)}


@pytest.fixture(scope="module")
def latent():
    return resources.compiled(resources.H100, {name: shape | dict(kernel="latent") for name, shape in LATENT.items()})


@pytest.mark.parametrize("name", LATENT)
def test_latent_fits(latent, name):
    """Its 256 threads may take all registers there are."""
    its = latent[name]["paged_latent"]
    assert its["spill_bytes"] == 0
    assert its["smem_bytes"] <= SMEM_OF_ONE
