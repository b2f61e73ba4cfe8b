"""Runs the PTX of a kernel without a GPU: a program at a time, all its threads in step.

It knows the instructions of the kernel for adapters and those of Mosaic around it; another one raises. A branch must be
taken by all threads or by none. It is stricter than a GPU:

- A copy (cp.async) writes as late as it may, when it is waited for, or with `late=False` as early as it may.
- 16 bytes that a thread copied may be read by that thread only, and what another thread stored only behind a barrier.
- SMEM is NaN at first. Nothing outside of an array is read or written, and no byte of an array is written twice.
"""

import itertools
import re
from collections.abc import Callable, Sequence
from typing import Any

import ml_dtypes
import numpy as np

WARP = 32
NOBODY = -1
SMEM_BYTES = 1 << 18
NUMBERS = {"bf16": ml_dtypes.bfloat16, "f16": np.float16}
# Of Mosaic's prologue, and what threads in step need not do.
IGNORED = r"fence\.|\.|//|\)|\(|\{|\}"


class Grid:
    """The arrays of a launch, by the numbers of the kernel's parameters. What it writes is in `written`."""

    def __init__(self, ptx: str, arrays: Sequence[np.ndarray]):
        lines = [line.strip() for line in ptx[ptx.index("$L__func_begin0") :].splitlines()]
        self.threads = int(re.search(r"\.maxntid (\d+)", ptx)[1])
        self.lines = [line for line in lines if line and (line.endswith(":") or not re.match(IGNORED, line))]
        self.labels = {line[:-1]: i for i, line in enumerate(self.lines) if line.endswith(":")}
        self.arrays = [np.array(array, order="C").reshape(-1).view(np.uint8) for array in arrays]
        self.written = [np.zeros(len(array), bool) for array in self.arrays]

    def run(self, *grid: int, late: bool = True) -> None:
        for program in itertools.product(*map(range, reversed(grid))):
            Program(self, program[::-1], late).run()

    def bytes_at(self, addresses: np.ndarray, count: int) -> tuple[int, np.ndarray]:
        """The array and its indices [threads, count]."""
        numbers, offsets = addresses >> 40, addresses & ((1 << 40) - 1)
        assert len(set(numbers.tolist())) == 1
        number = int(numbers[0]) - 1
        assert (offsets % count == 0).all(), "not aligned"
        assert (offsets + count <= len(self.arrays[number])).all(), "outside of an array"
        return number, offsets[:, None] + np.arange(count)


class Program:
    def __init__(self, grid: Grid, ids: Sequence[int], late: bool):
        self.grid, self.late, self.me = grid, late, np.arange(grid.threads)
        special = {"%tid.x": self.me} | {f"%ctaid.{name}": i for name, i in zip("xyz", ids, strict=False)}
        self.registers = {name: np.broadcast_to(np.uint64(x), grid.threads) for name, x in special.items()}
        self.smem, self.copier = np.full(SMEM_BYTES, 255, np.uint8), np.full(SMEM_BYTES, NOBODY)
        self.writer = np.full(SMEM_BYTES, NOBODY)  # since the last barrier
        self.groups: list[list[Callable[[], None]]] = [[]]  # of copies that have not arrived; the last is open

    def run(self) -> None:
        at = 0
        while (line := self.grid.lines[at]) != "ret;":
            at += 1
            if line.endswith(":"):
                continue
            active = np.ones(self.grid.threads, bool)
            if line.startswith("@"):
                guard, line = line[1:].split(None, 1)
                active = self.read(guard.removeprefix("!")) != guard.startswith("!")
            name, *operands = line.rstrip(";").split(None, 1)
            operands = [x.strip() for x in re.findall(r"\{[^}]*\}|\[[^\]]*\]|[^,\s]+", "".join(operands))]
            if name in ("bra", "bra.uni"):
                assert active.all() == active.any(), "threads part"
                at = self.grid.labels[operands[0]] if active.any() else at
                continue
            self.do(name, operands, active)

    def read(self, operand: str) -> np.ndarray:
        if operand in self.registers:
            return self.registers[operand]
        if operand == "__dynamic_shmem__0":
            return np.zeros(self.grid.threads, np.uint64)
        number = int(operand[2:], 16) if operand.startswith("0f") else int(operand)  # 0f: the bits of a float32
        return np.broadcast_to(np.uint64(number % 2**64), self.grid.threads)

    def words(self, operand: str) -> list[np.ndarray]:
        return [self.read(x.strip()).astype(np.uint32) for x in operand.strip("{}").split(",")]

    def address(self, operand: str) -> np.ndarray:
        base, _, offset = operand.strip("[]").partition("+")
        return (self.read(base) + np.uint64(int(offset or 0))).astype(np.int64)

    def do(self, name: str, operands: list[str], active: np.ndarray) -> None:
        kind, *how = name.split(".")
        if name.startswith("cp.async.cg"):
            self.start_copy(*operands)
        elif name == "cp.async.commit_group":
            self.groups.append([])
        elif name == "cp.async.wait_group":
            pending = int(operands[0])
            while len(self.groups) - 1 > pending:
                for copy in self.groups.pop(0):
                    copy()
        elif name == "bar.sync" or name.startswith("mbarrier.arrive"):  # all threads do, and then wait
            self.writer[:] = NOBODY
        elif re.match(r"mbarrier\.(try|test)_wait", name):
            self.registers[operands[0]] = np.ones_like(active)
        elif name == "not.pred":
            self.registers[operands[0]] = ~self.read(operands[1])
        elif name.startswith("mbarrier.init"):
            pass
        elif name == "elect.sync":
            self.registers[operands[0].partition("|")[2]] = self.me % WARP == 0
        elif name.startswith("shfl.sync.idx"):
            self.registers[operands[0]] = self.read(operands[1])[self.me - self.me % WARP + int(operands[2])]
        elif name.startswith("mma.sync.aligned.m16n8k16.row.col.f32"):
            self.multiply(NUMBERS[how[-2]], *operands)
        elif name.startswith("ld.param"):
            number = int(re.search(r"param_(\d+)", operands[1])[1])
            self.registers[operands[0]] = np.full(self.grid.threads, (number + 1) << 40, np.uint64)
        elif kind == "ld" and "shared" not in how:
            number, places = self.grid.bytes_at(self.address(operands[1]), 4)
            self.set_words(operands[0], self.grid.arrays[number][places])
        elif kind == "ld":
            places = self.address(operands[1])[:, None] + np.arange(4 * int(how[1][1]))
            for owner, message in ((self.copier, "another thread copied it"), (self.writer, "no barrier")):
                assert ((owner[places] == NOBODY) | (owner[places] == self.me[:, None])).all(), message
            self.set_words(operands[0], self.smem[places])
        elif name.startswith("st.shared.v2"):
            places = self.address(operands[0])[:, None] + np.arange(8)
            self.smem[places] = np.stack(self.words(operands[1]), axis=1).view(np.uint8)
            self.writer[places] = self.me[:, None]
        elif name == "st.global.v4.b32":
            data = np.stack(self.words(operands[1]), axis=1).view(np.uint8)[active]
            if active.any():
                number, places = self.grid.bytes_at(self.address(operands[0])[active], 16)
                assert not self.grid.written[number][places].any(), "written twice"
                self.grid.arrays[number][places], self.grid.written[number][places] = data, True
        elif name == "mov.b64" and "{" in operands[1]:
            low, high = self.words(operands[1])
            self.registers[operands[0]] = low.astype(np.uint64) | high.astype(np.uint64) << np.uint64(32)
        elif name == "mov.b64" and "{" in operands[0]:
            self.set_words(operands[0], self.read(operands[1]).copy()[:, None].view(np.uint8))
        else:
            self.compute(name, kind, how, *operands)

    def start_copy(self, smem: str, gmem: str, size: str, num_bytes: str = "16") -> None:
        assert size == "16"
        places = self.address(smem)[:, None] + np.arange(16)
        number, sources = self.grid.bytes_at(self.address(gmem), 16)
        is_there = self.read(num_bytes).astype(np.int64)[:, None] == 16
        data = np.where(is_there, self.grid.arrays[number][sources], np.uint8(0))

        def copy() -> None:
            self.smem[places], self.copier[places] = data, self.me[:, None]

        if self.late:
            self.groups[-1].append(copy)
        else:
            copy()

    def set_words(self, targets: str, data: np.ndarray) -> None:
        for name, word in zip(targets.strip("{}").split(","), data.copy().view(np.uint32).T, strict=True):
            self.registers[name.strip()] = word.astype(np.uint64)

    def multiply(self, number: Any, result: str, left: str, right: str, sums: str) -> None:
        """In a warp: thread 4 g + t has rows g and g + 8, columns 2t and 2t + 1, and terms 2t, 2t + 1 and 8 more."""
        lane = self.me.reshape(-1, WARP)
        g, t = lane[0] // 4, lane[0] % 4

        def halves(word: np.ndarray) -> np.ndarray:
            return word[lane].view(number).astype(np.float32).reshape(*lane.shape, 2)

        a, b, c = (np.zeros((len(lane), *shape), np.float32) for shape in ((16, 16), (16, 8), (16, 8)))
        for i, word in enumerate(self.words(left)):
            for j in range(2):
                a[:, g + 8 * (i % 2), 2 * t + j + 8 * (i // 2)] = halves(word)[..., j]
        for i, word in enumerate(self.words(right)):
            for j in range(2):
                b[:, 2 * t + j + 8 * i, g] = halves(word)[..., j]
        places = [(g + 8 * (i // 2), 2 * t + i % 2) for i in range(4)]
        for at, word in zip(places, self.words(sums), strict=True):
            c[:, *at] = word[lane].view(np.float32)
        c += a @ b
        for name, at in zip(result.strip("{}").split(","), places, strict=True):
            self.registers[name.strip()] = np.ascontiguousarray(c[:, *at]).reshape(-1).view(np.uint32).astype(np.uint64)

    def compute(self, name: str, kind: str, how: list[str], target: str, *operands: str) -> None:
        x = [self.read(operand) for operand in operands]
        bits = int(re.search(r"\d+$", how[-1])[0]) if how else 32
        signed = [y.astype(np.uint32).view(np.int32) if bits == 32 else y.view(np.int64) for y in x] if x else x
        if kind == "setp":
            ordered = signed if how[-1].startswith("s") else [y & np.uint64((1 << bits) - 1) for y in x[:2]]
            result = {"lt": np.less, "gt": np.greater, "eq": np.equal, "ne": np.not_equal}[how[0]](*ordered[:2])
            self.registers[target] = result & x[2].astype(bool) if how[1] == "and" else result
            return
        if name == "add.rn.f32":
            numbers = [y.astype(np.uint32).view(np.float32) for y in x]
            result = (numbers[0] + numbers[1]).view(np.uint32)
        elif kind == "cvt" and how[0] == "rn":  # the first operand is the upper half
            narrow = [y.astype(np.uint32).view(np.float32).astype(NUMBERS[how[1][:-2]]).view(np.uint16) for y in x]
            result = narrow[0].astype(np.uint32) << np.uint32(16) | narrow[1]
        else:
            result = {
                "mov": lambda: x[0],
                "cvt": lambda: x[0],
                "cvta": lambda: x[0],
                "add": lambda: x[0] + x[1],
                "sub": lambda: x[0] - x[1],
                "and": lambda: x[0] & x[1],
                "or": lambda: x[0] | x[1],
                "shl": lambda: x[0] << x[1],
                "shr": lambda: (x[0] & np.uint64((1 << bits) - 1)) >> x[1],
                "mul": lambda: x[0] * x[1],
                "mad": lambda: x[0] * x[1] + x[2],
                "selp": lambda: np.where(x[2].astype(bool), x[0], x[1]),
            }[kind]()
            assert kind != "shr" or how[-1][0] == "u"
        keep = 64 if name == "mul.wide.u32" or target.startswith("%rd") else 32
        self.registers[target] = result.astype(np.uint64) & np.uint64(2**keep - 1)
