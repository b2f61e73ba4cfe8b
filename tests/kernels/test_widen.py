"""The instructions that widen and exchange, carried out on a CPU for every lane: interpret mode knows none of them."""

import re
import types

import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu import fragmented_array

from pallas_kernels.common import sizes, widen

LANES = 128


def as_bytes(x):
    return x.view(np.uint8).reshape(*x.shape, 4)


def prmt(a, b, selector):
    pool = np.concatenate([as_bytes(a), as_bytes(np.broadcast_to(np.uint32(b), a.shape).copy())], axis=-1)
    return np.ascontiguousarray(pool[:, [selector >> 4 * i & 7 for i in range(4)]]).view(np.uint32)[:, 0]


def run(ptx, *args, **_):
    """The value of `$0`, uint32 [lanes], after the instructions that `widen` emits."""
    number = {"a": None, "$1": None} | {f"${i + 1}": x for i, x in enumerate(args)}
    lane = np.arange(LANES, dtype=np.uint32)

    def value(name):
        name = name.strip()
        return number[name] if name in number else np.uint32(int(name, 0) & 0xFFFFFFFF)

    for line in ptx.strip().strip("{}").replace("{ ", "").split(";"):
        line = line.strip().rstrip("}").strip()
        if not line or line.startswith(".reg"):
            continue
        op, rest = line.split(" ", 1)
        if op == "mov.b32" and rest.startswith("{"):
            low, high = re.findall(r"h\d", rest)
            halves = number["$1"].view(np.uint16).reshape(LANES, 2)
            number[low], number[high] = halves[:, 0].copy(), halves[:, 1].copy()
            continue
        target, *sources = [part.strip() for part in rest.split(",")]
        if op.startswith("cvt"):
            narrow = number[sources[0]].view(jnp.float8_e4m3fn).astype(np.float16)
            number[target] = np.ascontiguousarray(narrow).view(np.uint32)
            continue
        x = [lane if name == "%laneid" else value(name) for name in sources]
        if op == "mov.u32":
            number[target] = x[0] % 32
        elif op == "mov.b32":
            number[target] = x[0]
        elif op.startswith("prmt"):
            number[target] = prmt(x[0], x[1], int(x[2]))
        elif op.startswith("sub"):
            left, right = (np.broadcast_to(part, LANES).copy().view(np.float16) for part in x)
            number[target] = (left - right).view(np.uint32)
        elif op.startswith("shfl"):
            number[target] = x[0][lane - lane % 32 + (x[1] & 31)]
        elif op.startswith("setp.lt"):
            number[target] = x[0] < x[1]
        elif op.startswith("selp"):
            number[target] = np.where(x[2], x[0], x[1])
        else:
            name = {"and": "bitwise_and", "or": "bitwise_or", "xor": "bitwise_xor", "shr": "right_shift"}
            name["shl"] = "left_shift"
            number[target] = getattr(np, name[op.split(".")[0]])(x[0], x[1]).astype(np.uint32)
    return number["$0"]


def registers(x, layout):
    """Every register of an array in a layout, [lanes] of a vector each, from the layout's own definition."""
    tiled = x.reshape(-1)[tile_order(x.shape, layout)]
    warp, *_ = layout.warp_dims
    major, minor = layout.lane_dims
    found = np.empty(layout.registers_shape(x.shape), dtype=object)
    for index in np.ndindex(*found.shape):
        lanes = []
        for lane in range(LANES):
            place = list(index)
            place[warp], place[major], place[minor] = lane // 32, lane % 32 // 4, lane % 4
            place[layout.vector_dim] = slice(None)
            lanes.append(tiled[tuple(place)])
        found[index] = np.stack(lanes)
    return found


def tile_order(shape, layout):
    """Where each number of the array that the layout tiles lies in the one that it does not."""
    index = np.arange(np.prod(shape)).reshape(shape)
    for tile in layout.tiling.tiles:
        kept = index.ndim - len(tile)
        split = [part for size, part in zip(index.shape[kept:], tile, strict=True) for part in (size // part, part)]
        index = index.reshape(*index.shape[:kept], *split)
        axes = [*range(kept), *range(kept, index.ndim, 2), *range(kept + 1, index.ndim, 2)]
        index = index.transpose(axes)
    return index


@pytest.fixture
def on_lanes(monkeypatch):
    """Registers are NumPy arrays [lanes]; what the functions inlined into the kernel return is kept."""
    kept = {}

    def inline(*, arg_types, return_type):
        return lambda f: lambda x: kept.setdefault("result", f(None, x))

    monkeypatch.setattr(widen.plgpu, "inline_mgpu", inline)
    monkeypatch.setattr(widen.utils, "inline_ptx", run)
    monkeypatch.setattr(widen.utils, "bitcast", lambda x, _: x)
    kinds = types.SimpleNamespace(get=lambda *_: None)
    monkeypatch.setattr(widen, "ir", types.SimpleNamespace(VectorType=kinds, F16Type=kinds, Value=None))
    monkeypatch.setattr(widen, "integer", lambda: None)
    monkeypatch.setattr(widen, "split_words", lambda x: [x])
    monkeypatch.setattr(widen, "from_words", lambda words, _: words[0])
    monkeypatch.setattr(
        fragmented_array,
        "FragmentedArray",
        lambda _registers, _layout, _is_signed: types.SimpleNamespace(registers=_registers, layout=_layout),
    )
    return kept


def fragment(x, layout):
    found = registers(x, layout)
    for index, value in np.ndenumerate(found):
        found[index] = np.ascontiguousarray(value).view(np.uint32)[:, 0]
    return found


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("dtype", sizes.DTYPES_8BIT)
def test_every_byte_widens_to_its_place(on_lanes, dtype, transposed):
    tile = np.random.default_rng(0).permutation(np.arange(64 * 128) % 256).astype(np.uint8).reshape(64, 128)
    words = tile.view(np.int16)  # [tokens, words of two columns]
    wide = tile.view(dtype).astype(np.float16)
    if transposed:
        layout, words, wide = widen.WORDS.to_mgpu(), words.T, wide.T
        expected = wide.reshape(-1, 16, 64)[:, list(widen.V_ORDER)].reshape(wide.shape)
    else:
        layout = mgpu.WGMMA_LAYOUT
        expected = wide.reshape(64, -1, 16)[:, :, list(widen.K_ORDER)].reshape(wide.shape)
    narrow = types.SimpleNamespace(registers=fragment(np.ascontiguousarray(words), layout), shape=words.shape)
    widen._widen(narrow, dtype, widen.ROWS, transposed=transposed)
    found, right = on_lanes["result"].registers, fragment(np.ascontiguousarray(expected), mgpu.WGMMA_LAYOUT)
    assert found.shape == right.shape
    for a, b in zip(found.flat, right.flat, strict=True):
        np.testing.assert_array_equal(a.view(np.float16), b.view(np.float16))  # NaN is NaN, whatever its bits


@pytest.mark.parametrize("order", [widen.K_ORDER, widen.V_ORDER, tuple(widen.V_ORDER.index(c) for c in range(16))])
def test_rows_are_exchanged(on_lanes, order):
    x = np.arange(64 * 16).astype(np.float16).reshape(64, 16)
    wrapped = types.SimpleNamespace(
        registers=fragment(x, mgpu.WGMMA_LAYOUT), layout=mgpu.WGMMA_LAYOUT, is_signed=None, shape=x.shape, dtype=x.dtype
    )
    for register in wrapped.registers.flat:
        assert register.shape == (LANES,)
    array_type = type("Register", (np.ndarray,), {"type": None})
    for index, register in np.ndenumerate(wrapped.registers):
        wrapped.registers[index] = register.view(array_type)
    widen._exchange(wrapped, order)
    expected = np.ascontiguousarray(x.reshape(-1, 16, 16)[:, list(order)].reshape(x.shape))
    found, right = on_lanes["result"].registers, fragment(expected, mgpu.WGMMA_LAYOUT)
    assert found.shape == right.shape
    assert all((a == b).all() for a, b in zip(found.flat, right.flat, strict=True))
