"""What each thread copies, and where to: the address arithmetic of the copies, done with Python's integers, not MLIR.

Interpret mode copies at once, and does not run it.
"""

import dataclasses
import itertools
import operator
import types

import numpy as np
import pytest

from pallas_kernels.common import cp_async, mlir
from pallas_kernels.prefill import rows_of_item

START, SMEM = 10**9, 2**14  # addresses


@dataclasses.dataclass(frozen=True)
class Ref:
    start: int
    shape: tuple[int, ...]
    element_type: int  # bits

    @property
    def type(self):
        return self

    @property
    def registers(self):  # of a scalar
        return np.array(self.start)


COMPARISONS = {"ult": lambda a, b: 0 <= a < b, "slt": operator.lt, "sge": operator.ge}
ARITH = types.SimpleNamespace(
    CmpIPredicate=types.SimpleNamespace(**{name: name for name in COMPARISONS}),
    cmpi=lambda name, a, b: COMPARISONS[name](a, b),
    select=lambda condition, a, b: a if condition else b,
    addi=operator.add,
    subi=operator.sub,
    muli=operator.mul,
    divui=operator.floordiv,
    remui=operator.mod,
    andi=operator.and_,
    xori=operator.xor,
    shrui=operator.rshift,
    shli=operator.lshift,
    extui=lambda _, x: x,
)


@pytest.fixture
def copied(monkeypatch):
    """Runs what a kernel inlines for all threads: the copies, each its text and operands."""
    found, now = [], types.SimpleNamespace(thread=0)

    def inline_mgpu(**_):
        def inline(body):
            def run(*arguments):
                scalars = [Ref(int(x), (), 32) if np.ndim(x) == 0 and not isinstance(x, Ref) else x for x in arguments]
                for now.thread in range(128):
                    body(None, *scalars)

            return run

        return inline

    utils = types.SimpleNamespace(
        thread_idx=lambda: now.thread,
        bitwidth=lambda bits: bits,
        memref_ptr=lambda ref: ref.start,
        inline_ptx=lambda text, *operands, predicate=True, **_: found.append((text, operands)) if predicate else None,
    )
    stand_ins = dict(
        arith=ARITH,
        utils=utils,
        ir=types.SimpleNamespace(MemRefType=lambda its: its),
        llvm=types.SimpleNamespace(ptrtoint=lambda _, x: x),
        constant=lambda _, x: x,
        integer=lambda bits=32: bits,
        product=operator.mul,
        quotient=operator.floordiv,
        remainder=operator.mod,
        below=COMPARISONS["ult"],
    )
    for module, (name, standing_in) in itertools.product((mlir, cp_async, rows_of_item), stand_ins.items()):
        if hasattr(module, name):
            monkeypatch.setattr(module, name, standing_in)
    mosaic = types.SimpleNamespace(inline_mgpu=inline_mgpu, RefType=lambda *_: None)
    monkeypatch.setattr(cp_async, "plgpu", mosaic)
    return found, now


def in_smem(row, byte, columns, bits):
    """The address of 16 bytes of a row, tiled by 8 rows and 64 columns, and swizzled."""
    row_bytes = 8 * bits  # of a tile
    offset = ((row // 8 * columns + byte // row_bytes) * 8 + row % 8) * row_bytes + byte % row_bytes
    return SMEM + (offset ^ (offset >> 7 & row_bytes // 16 - 1) << 4)


@pytest.mark.parametrize("bits", [8, 16])
@pytest.mark.parametrize("head_dim", [64, 80, 128, 192, 256])
@pytest.mark.parametrize(("tile", "block_size"), [(32, 8), (64, 8), (64, 16), (32, 64), (64, 256), (128, 64)])
def test_a_tile(copied, tile, block_size, head_dim, bits):
    found, _ = copied
    kv_heads, kv_head, slot, seen = 3, 2, tile if block_size > tile else 0, (5, tile - 3)
    columns, ids = -(-head_dim // 64), list(range(40, 40 + max(1, tile // block_size)))
    source, target = (
        Ref(START, (99, block_size, kv_heads, head_dim), bits),
        Ref(SMEM, (tile // 8, columns, 8, 64), bits),
    )
    cp_async.copy_tile(source, target, (), ids, slot, kv_head, seen)
    row_bytes, run, expected = head_dim * bits // 8, tile // len(ids), {}
    for row in range(tile):
        for byte in range(0, columns * 8 * bits, 16):
            number = (ids[row // run] * block_size + slot + row % run) * kv_heads + kv_head
            is_there = seen[0] <= row < seen[1] and byte < row_bytes
            expected[in_smem(row, byte, columns, bits)] = START + number * row_bytes + byte if is_there else None
    assert {smem: gmem if num_bytes else None for _, (smem, gmem, num_bytes) in found} == expected


@pytest.mark.parametrize(("tile", "block_size"), [(32, 8), (64, 16), (128, 256)])
def test_scales_of_tokens(copied, tile, block_size):
    found, _ = copied
    ids, slot = list(range(40, 40 + max(1, tile // block_size))), tile if block_size > tile else 0
    cp_async.copy_scales(Ref(START, (99, block_size, 3), 32), Ref(SMEM, (tile,), 32), ids, slot, 2)
    run = tile // len(ids)
    numbers = [(ids[row // run] * block_size + slot + row % run) * 3 + 2 for row in range(tile)]
    assert {operands for _, operands in found} == {(SMEM + 4 * i, START + 4 * n) for i, n in enumerate(numbers)}


@pytest.mark.parametrize("num_tokens", [0, 3, 200])
@pytest.mark.parametrize(
    ("head_dim", "rows", "first_row", "heads", "item_tokens"),
    [(128, 64, 64, 4, 32), (128, 128, 0, 4, 32), (80, 128, 0, 5, 24), (256, 64, 0, 1, 64), (192, 64, 64, 3, 40)],
)
def test_the_rows_of_an_item(copied, head_dim, rows, first_row, heads, item_tokens, num_tokens):
    _, now = copied
    columns, array = -(-head_dim // 64), Ref(START, (999, 9, head_dim), 16)
    config = types.SimpleNamespace(heads=heads, item_tokens=item_tokens)
    where = rows_of_item._ItemRows(config, first_row, 17, 2, num_tokens)
    expected, found = {}, {}
    for now.thread in range(128):
        for chunk in rows_of_item._chunks(array, Ref(SMEM, (rows // 8, columns, 8, 64), 16), where):
            found[chunk.smem] = chunk.gmem if chunk.is_there else None
    for row in range(rows):
        head, token = divmod(first_row + row, item_tokens)
        for byte in range(0, columns * 128, 16):
            is_there = head < heads and token < num_tokens and byte < 2 * head_dim
            number = ((17 + token) * 9 + 2 + head) * head_dim
            expected[in_smem(row, byte, columns, 16)] = START + 2 * number + byte if is_there else None
    assert found == expected
