"""A model of the allocator and its prefix cache in dicts and lists, one sequence at a time."""

import copy
from collections import Counter

from jaxpaged._allocator.block_allocator import MORE_PASSED

Pair = tuple[int, int]


class Model:
    def __init__(self, num_blocks: int, block_size: int, num_seqs: int, max_blocks: int, windows: tuple = (None,)):
        self.windows, self.num_seqs = windows, num_seqs
        self.num_blocks, self.block_size, self.max_blocks = num_blocks, block_size, max_blocks
        self.free = list(range(num_blocks - 1, 0, -1))  # the next block is last
        self.num_waiting = 0  # free blocks, from the start, that may be cached
        self.holders: Counter[int] = Counter()
        self.num_drops: Counter[int] = Counter()  # how often a block's tokens were dropped
        self.cached: dict[int, tuple] = {}  # block -> (salt, all tokens up to its end); (salt, group) after the first
        # (group, block of the first group) -> block of that group, while the first is cached
        self.companions: dict[tuple[int, int], int] = {}
        # A row for each group and sequence, one group after the other; the first `passed` of its blocks are 0.
        self.blocks: list[list[int]] = [[] for _ in range(len(windows) * num_seqs)]
        self.passed = [0] * len(self.blocks)
        self.tokens: list[list[int]] = [[] for _ in range(num_seqs)]  # written tokens, for the prefix cache
        self.salts = [0] * num_seqs

    @property
    def lengths(self) -> list[int]:
        return [len(tokens) for tokens in self.tokens]

    def num_blocks_for(self, length: int) -> int:
        return -(-length // self.block_size)

    def rows_of(self, seq: int) -> range:
        return range(seq, len(self.blocks), self.num_seqs)

    def held(self, row: int) -> list[int]:
        return self.blocks[row][self.passed[row] :]

    def first_visible(self, row: int, length: int) -> int:
        """The first block that a query at position `length` sees."""
        window = self.windows[row // self.num_seqs]
        return 0 if window is None else max(length - window + 1, 0) // self.block_size

    def release_passed(self, seqs: list[int], most: int) -> None:
        gone: list[list[int]] = [[] for _ in self.blocks]
        for row in (row for seq in seqs for row in self.rows_of(seq)):
            before = self.passed[row]
            self.passed[row] = max(
                before, min(self.first_visible(row, self.lengths[row % self.num_seqs]), before + most)
            )
            gone[row] = self.blocks[row][before : self.passed[row]]
            self.blocks[row] = [0] * self.passed[row] + self.held(row)
        self.release(gone)

    # The pool

    def take(self) -> int:
        block = self.free.pop()
        if len(self.free) < self.num_waiting:
            self.num_waiting -= 1
            self.forget(block)
        self.holders[block] = 1
        return block

    def forget(self, block: int) -> None:
        self.cached.pop(block, None)
        gone = [pair for pair, companion in self.companions.items() if block in (pair[1], companion)]
        for pair in gone:
            del self.companions[pair]

    def release(self, rows: list[list[int]]) -> None:
        for blocks in reversed(rows):
            for block in reversed(blocks):
                self.holders[block] -= 1
                if self.holders[block] == 0:
                    self.num_drops[block] += 1
                    if block in self.cached:
                        self.free.insert(0, block)
                        self.num_waiting += 1
                    else:
                        self.free.append(block)

    def acquire(self, block: int) -> None:
        if self.holders[block] == 0:
            self.free.remove(block)
            self.num_waiting -= 1
        self.holders[block] += 1

    def grant(self, needs: list[int | None]) -> list[bool]:
        """Whether each row gets its blocks, in order; None: illegal. A row that needs blocks cannot overtake."""
        left, oks = len(self.free), []
        for need in needs:
            left -= need or 0
            oks.append(need is not None and (need == 0 or left >= 0))
        return oks

    # The operations

    def append(self, new: list[list[int]], counts: list[int], q_len: int) -> tuple[list[list[int]], list[bool]]:
        """Appends `counts[i]` of the tokens `new[i]` to sequence i if that is legal. Returns the slots of each row."""
        needs: list[int | None] = []
        for i, count in enumerate(counts):
            length = self.lengths[i] + count
            legal = 0 <= count <= q_len and length <= self.max_blocks * self.block_size
            needs.append(self.num_blocks_for(length) - self.num_blocks_for(self.lengths[i]) if legal else None)
        most = -(-q_len // self.block_size) + MORE_PASSED
        self.release_passed([i for i, need in enumerate(needs) if need is not None and counts[i]], most)
        oks = self.grant([None if need is None else need * len(self.windows) for need in needs])
        slots: list[list[int]] = [[] for _ in self.blocks]
        for i, ok in enumerate(oks):
            if ok:
                start = self.lengths[i]
                self.tokens[i] = self.tokens[i] + new[i]
                for row in self.rows_of(i):
                    self.blocks[row] = self.blocks[row] + [self.take() for _ in range(needs[i] or 0)]
                    slots[row] = [self.slot(row, token) for token in range(start, self.lengths[i])]
        return slots, oks

    def slot(self, row: int, token: int) -> int:
        return self.blocks[row][token // self.block_size] * self.block_size + token % self.block_size

    def free_rows(self, marked: list[bool]) -> None:
        rows = range(len(self.blocks))
        self.release([self.held(row) if marked[row % self.num_seqs] else [] for row in rows])
        for i, mark in enumerate(marked):
            if mark:
                self.tokens[i] = []
                for row in self.rows_of(i):
                    self.blocks[row], self.passed[row] = [], 0

    def fork(self, parents: list[int], replace: bool) -> tuple[list[Pair], list[bool]]:
        rows, num_groups = range(len(parents)), len(self.windows)
        legal = [p in rows and p != i and (replace or not self.tokens[i]) for i, p in enumerate(parents)]

        def needs(heirs: set[int]) -> list[int | None]:
            """A block in each group for a child that inherits no partly filled one."""
            copied = [legal[i] and self.lengths[parents[i]] % self.block_size > 0 and i not in heirs for i in rows]
            return [num_groups * copied[i] if legal[i] else None for i in rows]

        first_children = {parents[i]: i for i in reversed(rows) if legal[i]}
        heirs = {child for parent, child in first_children.items() if legal[parent]}
        if sum(need or 0 for need in needs(heirs)) > len(self.free):
            heirs = set()
        needed = needs(heirs)
        oks = self.grant(needed)
        old = [self.held(row) for row in range(len(self.blocks))]
        blocks, passed, tokens, salts = list(self.blocks), list(self.passed), list(self.tokens), list(self.salts)
        pairs: dict[int, Pair] = {}
        for i in (i for i in rows if oks[i]):
            tokens[i], salts[i] = self.tokens[parents[i]], self.salts[parents[i]]
            for row, parent in zip(self.rows_of(i), self.rows_of(parents[i]), strict=True):
                blocks[row], passed[row] = list(self.blocks[parent]), self.passed[parent]
                shared = list(old[parent])
                if needed[i]:
                    blocks[row][-1] = self.take()
                    pairs[row] = (shared.pop(), blocks[row][-1])
                self.holders.update(shared)
        self.release([blocks if oks[row % self.num_seqs] else [] for row, blocks in enumerate(old)])
        self.blocks, self.passed, self.tokens, self.salts = blocks, passed, tokens, salts
        oks = [ok or parent in (-1, i) for i, (ok, parent) in enumerate(zip(oks, parents, strict=True))]
        return [pairs[row] for row in sorted(pairs)], oks

    def rollback(self, lengths: list[int]) -> tuple[list[Pair], list[bool]]:
        def is_cut(i: int) -> bool:
            return lengths[i] < self.lengths[i] and lengths[i] % self.block_size > 0

        def is_copied(row: int) -> bool:
            """Whether the row ends in a block that other rows share."""
            block = self.blocks[row][lengths[row % self.num_seqs] // self.block_size]
            return self.holders[block] > 1 or block in self.cached

        def is_legal(i: int) -> bool:
            in_view = all(self.passed[row] <= self.first_visible(row, lengths[i]) for row in self.rows_of(i))
            return 0 <= lengths[i] <= self.lengths[i] and (lengths[i] == 0 or in_view)

        legal = [is_legal(i) for i in range(len(lengths))]
        copied = {
            row for i, fine in enumerate(legal) if fine and is_cut(i) for row in self.rows_of(i) if is_copied(row)
        }
        oks = self.grant([len(copied & {*self.rows_of(i)}) if fine else None for i, fine in enumerate(legal)])
        pairs: dict[int, Pair] = {}
        gone: list[list[int]] = [[] for _ in self.blocks]
        shortened = []
        for i in (i for i, ok in enumerate(oks) if ok):
            kept = self.num_blocks_for(lengths[i])
            for row in self.rows_of(i):
                self.passed[row] = self.passed[row] if kept else 0
                gone[row] = [block for block in self.blocks[row][kept:] if block]
                self.blocks[row] = self.blocks[row][:kept]
                if row in copied:
                    source = self.blocks[row].pop()
                    gone[row] = [source, *gone[row]]
                    self.blocks[row].append(self.take())
                    pairs[row] = (source, self.blocks[row][-1])
                elif is_cut(i):
                    shortened.append(self.blocks[row][-1])
        self.release(gone)
        self.num_drops.update(shortened)
        self.tokens = [tokens[: lengths[i]] if oks[i] else tokens for i, tokens in enumerate(self.tokens)]
        return [pairs[row] for row in sorted(pairs)], oks

    # The prefix cache

    def key(self, salt: int, tokens: list[int], column: int) -> tuple:
        return salt, *tokens[: (column + 1) * self.block_size]

    def match_prefix(self, prompts: list[list[int]], salts: list[int]) -> list[int]:
        found, num_cached = {key: block for block, key in self.cached.items()}, []
        for i, prompt in enumerate(prompts):
            hits: list[int] = []
            if prompt and not self.tokens[i]:
                for column in range(min((len(prompt) - 1) // self.block_size, self.max_blocks)):
                    key = self.key(salts[i], prompt, column)
                    if key not in found:
                        break
                    hits.append(found[key])
            while any(None in blocks for blocks in self.prefix_blocks(i, hits)):
                hits.pop()
            num_cached.append(len(hits) * self.block_size)
            if hits:
                self.tokens[i], self.salts[i] = prompt[: num_cached[i]], salts[i]
                for row, blocks in zip(self.rows_of(i), self.prefix_blocks(i, hits), strict=True):
                    self.passed[row] = self.first_visible(row, num_cached[i])
                    self.blocks[row] = [0] * self.passed[row] + blocks
                    for block in blocks:
                        self.acquire(block)
        return num_cached

    def prefix_blocks(self, seq: int, hits: list[int]) -> list[list]:
        """The blocks of each row that begins with these of the first group; None: not cached."""
        found = []
        for group, row in enumerate(self.rows_of(seq)):
            columns = range(self.first_visible(row, len(hits) * self.block_size), len(hits))
            found.append([hits[c] if group == 0 else self.companions.get((group, hits[c])) for c in columns])
        return found

    def insert(self, width: int) -> None:
        found, swaps = {key: block for block, key in self.cached.items()}, []
        num_full = [n // self.block_size if n <= width else 0 for n in self.lengths]
        for seq, tokens in enumerate(self.tokens):
            for column in range(num_full[seq]):
                key, own = self.key(self.salts[seq], tokens, column), self.blocks[seq][column]
                if found.setdefault(key, own) == own:
                    self.cached[own] = key
                else:
                    swaps.append((seq, column, found[key]))
        self.swap(swaps)
        swaps = []
        for row in range(self.num_seqs, len(self.blocks)):  # the other groups
            group, seq = divmod(row, self.num_seqs)
            for column in range(self.passed[row], num_full[seq]):
                first, own = self.blocks[seq][column], self.blocks[row][column]
                companion = self.companions.setdefault((group, first), own)
                if companion == own:
                    salt, *tokens = self.cached[first]
                    self.cached[own] = ((salt, group), *tokens)
                else:
                    swaps.append((row, column, companion))
        self.swap(swaps)

    def swap(self, swaps: list[tuple[int, int, int]]) -> None:
        """Replaces blocks of rows by cached ones: (row, column, cached block)."""
        gone: list[list[int]] = [[] for _ in self.blocks]
        for row, column, cached in swaps:
            gone[row].append(self.blocks[row][column])
            self.blocks[row][column] = cached
            self.acquire(cached)
        self.release(gone)

    def clear(self) -> None:
        self.cached, self.companions, self.num_waiting = {}, {}, 0

    # Restoring an earlier copy

    def has_kept_blocks_of(self, old: "Model") -> bool:
        """Whether no block that the old model's sequences hold has been dropped since."""
        rows = range(len(old.blocks))
        return all(self.num_drops[block] == old.num_drops[block] for row in rows for block in old.held(row))

    def rolled_back_to(self, old: "Model") -> "Model":
        """The old model with an empty prefix cache. Tokens outside its full blocks count as dropped."""
        new = copy.deepcopy(old)
        new.clear()
        num_full = [length // self.block_size for length in old.lengths] * len(old.windows)
        kept = {block for blocks, n in zip(old.blocks, num_full, strict=True) for block in blocks[:n]}
        new.num_drops = Counter(
            {block: self.num_drops[block] + (block not in kept) for block in range(self.num_blocks)}
        )
        return new
