"""How a program writes its sums: as finished rows, or as a float32 partial for the merge kernel.

A program may exit once its results have been read from SMEM; only a later kernel uses them.
Everything here is traced inside the decode kernel.
"""

from typing import Any

import jax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import _rows
from pallas_kernels._rows import ROWS_LAST, Orientation
from pallas_kernels.paged_decode import _cluster
from pallas_kernels.paged_decode._output import Output

Chunks = tuple[jax.Array, ...]


def finish(acc: Chunks, m: jax.Array, l: jax.Array, output: Output, *, orientation: Orientation) -> None:
    """`acc`: f32 [chunk, rows] each, the chunks of O^T, or by the orientation [rows, chunk], those of O. m, in units of
    log2, and l: f32 [rows]."""

    def share() -> None:
        if output.sharing.cluster > 1:
            (chunk,) = acc
            _cluster.merge(chunk, m, l, output)
        else:
            _write_partial(acc, m, l, output, orientation)

    pl.when(output.whole)(lambda: _write_rows(acc, m, l, output, orientation))
    pl.when(output.split)(share)


def _write_rows(acc: Chunks, m: jax.Array, l: jax.Array, output: Output, orientation: Orientation) -> None:
    q_flat_smem, row_smem = output.refs.q_flat_smem, output.refs.row_smem  # [rows + 1, width]; f32 [2, rows]
    rows, chunk = m.shape[0], acc[0].shape[1 - orientation.axis]
    factor, lse = _rows.normalise(m, l, output.sinks(orientation.vector))
    out = [(part * orientation.over(factor, part.shape)).astype(q_flat_smem.dtype) for part in acc]
    places = [q_flat_smem.at[pl.ds(0, rows), pl.ds(c * chunk, chunk)] for c in range(len(acc))]  # Q is no longer needed
    chunks = list(zip(places, out, strict=True))
    _store(((row_smem.at[0], lse),), chunks, output, orientation, transposed=orientation == ROWS_LAST)
    plgpu.commit_smem()
    output.copy_rows(q_flat_smem)
    output.copy_lse(row_smem.at[0])
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)


def _write_partial(acc: Chunks, m: jax.Array, l: jax.Array, output: Output, orientation: Orientation) -> None:
    acc_smem, row_smem = output.refs.acc_smem, output.refs.row_smem  # f32 [chunk, rows], [2, rows]
    chunk = acc_smem.shape[0]
    for c, part in enumerate(acc):
        vectors = ((row_smem.at[0], m), (row_smem.at[1], l)) if c == 0 else ()
        if c > 0:
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        _store(vectors, [(acc_smem, part)], output, orientation, transposed=orientation != ROWS_LAST)
        plgpu.commit_smem()
        output.copy_partial(acc_smem, pl.ds(c * chunk, chunk))
    output.copy_m_and_l(row_smem)
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)


def _store(vectors: Any, matrices: Any, output: Output, orientation: Orientation, *, transposed: bool) -> None:
    plain, turned = ((), matrices) if transposed else (matrices, ())
    _rows.store_together(*plain, *vectors, transposed=turned, orientation=orientation)
