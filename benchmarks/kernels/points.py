"""Named shapes for the benchmarks of the kernels, sets of them, and their inputs.

A point is written as heads, batch x length and options: `32/8 64x8192 block_size=64`. Instead of a length, `ragged8192`
draws lengths uniformly from 1..8192; `zipf8192` gives 8192, 8192 / 2, 8192 / 3, ..., shuffled; `outlier131072` gives
131072 tokens to the sequence in the middle and 1024 to the others. Options:

  cache=float8_e4m3fn scale=head   a quantised cache
  room=8192                        block tables with room for 8192 tokens per sequence
  q_len=8 tree=1                   a binary tree of 8 drafted tokens
  shared=8192                      all sequences begin with the same 8192 tokens, in the same blocks
  shared=8192 groups=32            each of 32 groups of sequences has its own 8192 shared tokens
  alone=1                          every sequence reads the shared blocks itself
  head_dim=576 latent=512          a cache of latents, whose first 512 numbers are the values; `16/1` are 16 heads
"""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.harness import COLD_BYTES, random

HEADS = ("32/8", "64/8", "32/32", "8/1")
SHAPES = (
    *("1x512", "1x8192", "1x32768", "1x131072", "8x2048", "8x8192", "32x2048", "64x2048"),
    *("128x1024", "256x1024", "64xragged8192", "64x8192"),
)
GRID = tuple(f"{heads} {shape}" for heads in HEADS for shape in SHAPES)
VARIANTS = (
    *(f"32/8 {shape} {option}" for option in ("block_size=64", "contiguous=1") for shape in ("8x2048", "64x8192")),
    *(f"32/8 {shape} head_dim={n}" for n in (64, 256) for shape in ("1x8192", "64x2048", "64x8192")),
    *(f"32/8 {shape} window=1024" for shape in ("1x32768", "64x8192")),
    *(f"32/8 {shape} q_len={n}" for n in (4, 16) for shape in ("1x8192", "8x2048", "64x8192")),
    *("32/8 64x2048 q_len=8", "32/8 64x2048 q_len=8 tree=1"),
    *("32/8 64xzipf8192", "64/8 64xzipf8192", "32/32 64xzipf8192"),
)
_CACHES = (
    "",
    *(f" cache={dtype} scale={scale}" for dtype in ("float8_e4m3fn", "int8") for scale in ("head", "token_head")),
)
QUANTISED = (
    *(f"32/8 {shape}{cache}" for shape in ("64x8192", "8x4096", "64x2048", "1x8192") for cache in _CACHES),
    *(f"{point}{cache}" for point in ("64/8 8x8192", "32/8 8x2048 q_len=4") for cache in _CACHES[:3:2]),
    "32/8 64x8192 cache=float8_e5m2 scale=head",
)
# Decode steps of sequences that share blocks, read once or by each sequence.
SHARED = tuple(
    f"32/8 {shape}{alone}"
    for shape in (
        *(f"64x{shared + 256} shared={shared}" for shared in (8192, 2048, 512, 128)),
        *(f"8x{shared + 256} shared={shared}" for shared in (8192, 2048, 512)),
        *(f"256x{shared + 256} shared={shared} groups=32" for shared in (2048, 512)),
        *(f"64x8448 shared=8192 {option}" for option in ("room=131072", "cache=float8_e4m3fn scale=head")),
    )
    for alone in ("", " alone=1")
)
# DeepSeek's latents: 512 numbers and 64 rotary ones. With int8 the rotary numbers are stored in two parts.
_LATENT = "head_dim=576 latent=512 block_size=64"
LATENTS = (
    *(f"{heads}/1 64x4096 {_LATENT}" for heads in (16, 32, 128)),
    *(f"16/1 {shape} {_LATENT}" for shape in ("8x32768", "1x8192", "64x8192")),
    f"16/1 64x8192 {_LATENT} cache=float8_e4m3fn scale=token_head",
    f"16/1 64x8192 {_LATENT.replace('576', '640')} cache=int8 scale=token_head",
)
SETS = {"grid": GRID, "variants": VARIANTS, "quantised": QUANTISED, "shared": SHARED, "latents": LATENTS}
LATENT_SCALE = 192**-0.5  # a head has 128 numbers and 64 rotary ones
MAX_CALLS, MAX_CACHES, MAX_PAIRS = 256, 64, 512
L2_BYTES = 60_000_000  # more than L2 of an H100 or H200; more than this is read before any byte is read again


@dataclasses.dataclass(frozen=True)
class Point:
    name: str
    heads: int
    kv_heads: int
    lengths: tuple[int, ...]
    head_dim: int = 128
    block_size: int = 16
    q_len: int = 1
    window: int = 0  # 0: none
    room: int = 0  # tokens per table row, if more than the longest sequence needs
    tree: bool = False  # the q_len tokens of a sequence are a tree, not a chain
    contiguous: bool = False  # the blocks of a sequence in order, instead of shuffled
    dtype: str = "bfloat16"
    cache: str = ""  # the cache's dtype, if it is not `dtype`
    scale: str = ""  # scales of a quantised cache: head or token_head
    shared: int = 0  # tokens, in whole blocks, that the sequences of each group begin with
    groups: int = 1  # equally large groups of sequences that share blocks
    alone: int = 0  # 1: each sequence reads shared blocks itself
    latent: int = 0  # first numbers of the cache that are also the values; 0: values have their own cache

    @property
    def cache_dtype(self) -> str:
        return self.cache or self.dtype

    @property
    def scale_shape(self) -> tuple[int, ...]:
        return (self.kv_heads,) if self.scale == "head" else self.cache_shape[:3]

    @property
    def slots(self) -> int:
        """The number of slots that a call must read."""
        if not self.window:
            return sum(self.lengths) - self.shared * (len(self.lengths) - self.groups)
        return sum(min(length, self.window + self.q_len - 1) for length in self.lengths)

    @property
    def num_bytes(self) -> int:
        scale_bytes = 4 if self.scale == "token_head" else 0
        row_bytes = self.head_dim * jnp.dtype(self.cache_dtype).itemsize + scale_bytes
        return self.num_pools * self.slots * self.kv_heads * row_bytes

    @property
    def num_pools(self) -> int:
        return 1 if self.latent else 2

    @property
    def held(self) -> tuple[int, ...]:
        """The number of blocks of each sequence."""
        return tuple(-(-length // self.block_size) for length in self.lengths)

    @property
    def max_blocks(self) -> int:
        return max(max(self.held), self.room // self.block_size)

    @property
    def cache_shape(self) -> tuple[int, int, int, int]:
        """[blocks, block_size, kv_heads, head_dim]; block 0 belongs to no sequence."""
        again = self.shared // self.block_size * (len(self.held) - self.groups)
        return sum(self.held) - again + 1, self.block_size, self.kv_heads, self.head_dim

    @property
    def q_shape(self) -> tuple[int, int, int, int]:
        return len(self.lengths), self.q_len, self.heads, self.head_dim

    @property
    def num_calls(self) -> int:
        """Calls in one jit: 32, about the layers of a model; more if the host is slower than the GPU with 32, fewer if
        they would only repeat a long measurement."""
        microseconds = 4 + self.num_bytes / 2.8e6  # about
        if microseconds < 20:
            return MAX_CALLS if microseconds < 10 else 64
        return 32 if microseconds < 500 else 8

    @property
    def num_caches(self) -> int:
        """Caches that the calls of one jit rotate through: enough to keep L2 cold. Each is an argument that the host
        passes to the jit, which limits the number of small ones; dispatches rotate through sets of them instead."""
        return min(self.num_calls, MAX_CACHES, math.ceil(COLD_BYTES / self.num_bytes))

    @property
    def num_sets(self) -> int:
        """Sets of caches that successive dispatches rotate through, if the caches of one dispatch would fit into L2.

        No more sets than necessary: if arguments move between dispatches, XLA may have to update its CUDA graphs on
        the host (not measured), and a dispatch of very short kernels would then wait for the host."""
        wanted = math.ceil(L2_BYTES / (self.num_caches * self.num_bytes))
        return max(1, min(wanted, MAX_PAIRS // self.num_caches))


def parse(name: str) -> Point:
    heads, shape, *options = name.split()
    num_heads, kv_heads = map(int, heads.split("/"))
    batch, length = shape.split("x", 1)
    num_seqs = int(batch)
    rng = np.random.default_rng(0)
    if length.startswith("ragged"):
        lengths = tuple(rng.integers(1, int(length[6:]) + 1, num_seqs).tolist())
    elif length.startswith("zipf"):
        lengths = tuple(rng.permutation(int(length[4:]) // np.arange(1, num_seqs + 1)).tolist())
    elif length.startswith("outlier"):
        lengths = tuple(int(length[7:]) if seq == num_seqs // 2 else 1024 for seq in range(num_seqs))
    else:
        lengths = (int(length),) * num_seqs
    fields: dict[str, Any] = {
        key: value if key in ("cache", "scale") else int(value)
        for key, value in (option.split("=") for option in options)
    }
    fields |= {flag: bool(fields.get(flag)) for flag in ("contiguous", "tree")}
    return Point(name, num_heads, kv_heads, lengths, **fields)


@dataclasses.dataclass(frozen=True)
class Inputs:
    q: jax.Array  # [seqs, q_len, heads, head_dim]
    # Sets of (k_cache, v_cache, and their scales), one per layer. v_cache is None for latents.
    caches: tuple[tuple[tuple[Any, ...], ...], ...]
    block_tables: jax.Array  # int32 [seqs, max_blocks], the same for all layers, as in a model
    lengths: jax.Array  # int32 [seqs]


def make_tables(held: tuple[int, ...], max_blocks: int, *, contiguous: bool = False, seed: int = 0) -> np.ndarray:
    """Tables of blocks 1, 2, ... of the pool, shuffled over all sequences; block 0 is padding."""
    ids = np.arange(1, sum(held) + 1, dtype=np.int32)
    if not contiguous:
        ids = np.random.default_rng(seed).permutation(ids)
    tables = np.zeros((len(held), max_blocks), np.int32)
    for row, count, end in zip(tables, held, np.cumsum(held), strict=True):
        row[:count] = ids[end - count : end]
    return tables


def point_tables(point: Point) -> np.ndarray:
    """int32 [seqs, max_blocks]."""
    first = point.shared // point.block_size
    parts = (first,) * point.groups * bool(first) + tuple(count - first for count in point.held)
    tables = make_tables(parts, point.max_blocks, contiguous=point.contiguous)
    if not first:
        return tables
    shared = np.repeat(tables[: point.groups, :first], len(point.held) // point.groups, axis=0)
    return np.concatenate([shared, tables[point.groups :, : point.max_blocks - first]], axis=1)


def make_inputs(point: Point) -> Inputs:
    seeds = iter(range(4 * point.num_sets * point.num_caches))

    def layer() -> tuple[Any, ...]:
        made = [random(next(seeds), shape=point.cache_shape, dtype=point.cache_dtype) for _ in range(point.num_pools)]
        pools = *made, *[None] * (2 - len(made))
        if not point.scale:
            return pools
        size = 1.0 / 40 if point.cache_dtype == "int8" else 1.0  # as in `random`
        return pools + tuple(
            (1.0 + 0.1 * random(next(seeds), shape=point.scale_shape, dtype="float32")) * size for _ in made
        )

    caches = tuple(tuple(layer() for _ in range(point.num_caches)) for _ in range(point.num_sets))
    q = random(2**20, shape=point.q_shape, dtype=point.dtype)
    return Inputs(q, caches, jnp.asarray(point_tables(point)), jnp.asarray(point.lengths, jnp.int32))


def input_shapes(point: Point) -> Inputs:
    """The shapes of one set of `make_inputs`, for compilation."""
    cache = jax.ShapeDtypeStruct(point.cache_shape, point.cache_dtype)
    scales = (jax.ShapeDtypeStruct(point.scale_shape, jnp.float32),) * (point.num_pools if point.scale else 0)
    return Inputs(
        jax.ShapeDtypeStruct(point.q_shape, point.dtype),  # type: ignore[arg-type]
        (((cache, None if point.latent else cache, *scales),) * point.num_caches,),
        jax.ShapeDtypeStruct((len(point.held), point.max_blocks), jnp.int32),  # type: ignore[arg-type]
        jax.ShapeDtypeStruct((len(point.held),), jnp.int32),  # type: ignore[arg-type]
    )
