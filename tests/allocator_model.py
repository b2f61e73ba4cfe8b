"""What the allocator and its prefix cache must do, in dicts and lists, one sequence after the other."""

import copy
from collections import Counter

from jaxpaged._allocator.block_allocator import MORE_PASSED

Pair = tuple[int, int]


class Model:
    def __init__(self, num_blocks: int, block_size: int, num_seqs: int, max_blocks: int, windows: tuple = (None,)):
        self.windows, self.num_seqs = windows, num_seqs
        self.num_blocks, self.block_size, self.max_blocks = num_blocks, block_size, max_blocks
        self.free = list(range(num_blocks - 1, 0, -1))  # the next one last
        self.num_waiting = 0  # of them, from the start
        self.holders: Counter[int] = Counter()
        self.num_drops: Counter[int] = Counter()  # how often a block's tokens were dropped
        self.cached: dict[int, tuple] = {}  # block -> (salt, all tokens up to its end); the salt and the group behind 0
        # Blocks of the other groups by that of the first, while this is cached.
        self.companions: dict[tuple[int, int], int] = {}  # (group, block of the first) -> block
        # A row for each group and sequence, one group after the other; the first `passed` of its blocks are 0.
        self.blocks: list[list[int]] = [[] for _ in range(len(windows) * num_seqs)]
        self.passed = [0] * len(self.blocks)
        self.tokens: list[list[int]] = [[] for _ in range(num_seqs)]  # what was written, for the prefix cache
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

    def seen_from(self, row: int, length: int) -> int:
        """The first block of the row that a query at position `length` sees."""
        window = self.windows[row // self.num_seqs]
        return 0 if window is None else max(length - window + 1, 0) // self.block_size

    def let_go_passed(self, seqs: list[int], most: int) -> None:
        gone: list[list[int]] = [[] for _ in self.blocks]
        for row in (row for seq in seqs for row in self.rows_of(seq)):
            before = self.passed[row]
            self.passed[row] = max(before, min(self.seen_from(row, self.lengths[row % self.num_seqs]), before + most))
            gone[row] = self.blocks[row][before : self.passed[row]]
            self.blocks[row] = [0] * self.passed[row] + self.held(row)
        self.let_go(gone)

    # The pool.

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

    def let_go(self, rows: list[list[int]]) -> None:
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
        """Who gets what it needs, in order; None: not legal. Nobody who needs some overtakes."""
        left, oks = len(self.free), []
        for need in needs:
            left -= need or 0
            oks.append(need is not None and (need == 0 or left >= 0))
        return oks

    # The operations.

    def append(self, new: list[list[int]], counts: list[int], q_len: int) -> tuple[list[list[int]], list[bool]]:
        """`new`: the tokens of each sequence, `count` of them if that is legal. Slots of each row."""
        needs: list[int | None] = []
        for i, count in enumerate(counts):
            length = self.lengths[i] + count
            legal = 0 <= count <= q_len and length <= self.max_blocks * self.block_size
            needs.append(self.num_blocks_for(length) - self.num_blocks_for(self.lengths[i]) if legal else None)
        most = -(-q_len // self.block_size) + MORE_PASSED
        self.let_go_passed([i for i, need in enumerate(needs) if need is not None and counts[i]], most)
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
        self.let_go([self.held(row) if marked[row % self.num_seqs] else [] for row in rows])
        for i, mark in enumerate(marked):
            if mark:
                self.tokens[i] = []
                for row in self.rows_of(i):
                    self.blocks[row], self.passed[row] = [], 0

    def fork(self, parents: list[int], replace: bool) -> tuple[list[Pair], list[bool]]:
        rows = range(len(parents))

        def legal(i: int) -> bool:
            parent = parents[i]
            return parent not in (-1, i) and parent in rows and (replace or not self.tokens[i])

        def partial(i: int) -> bool:
            return self.lengths[parents[i]] % self.block_size > 0

        heirs = set()
        for parent in rows:
            children = [i for i in rows if legal(i) and parents[i] == parent]
            if children and legal(parent):
                heirs.add(children[0])
        num_groups = len(self.windows)
        if num_groups * sum(legal(i) and partial(i) and i not in heirs for i in rows) > len(self.free):
            heirs = set()
        oks = self.grant([num_groups * (partial(i) and i not in heirs) if legal(i) else None for i in rows])
        old = [self.held(row) for row in range(len(self.blocks))]
        blocks, passed, tokens, salts = list(self.blocks), list(self.passed), list(self.tokens), list(self.salts)
        pairs: dict[int, Pair] = {}
        for i in rows:
            if not oks[i]:
                continue
            tokens[i], salts[i] = self.tokens[parents[i]], self.salts[parents[i]]
            for row, parent in zip(self.rows_of(i), self.rows_of(parents[i]), strict=True):
                blocks[row], passed[row] = list(self.blocks[parent]), self.passed[parent]
                shared = list(old[parent])
                if partial(i) and i not in heirs:
                    source = shared.pop()
                    blocks[row][-1] = self.take()
                    pairs[row] = (source, blocks[row][-1])
                self.holders.update(shared)
        self.let_go([blocks if oks[row % self.num_seqs] else [] for row, blocks in enumerate(old)])
        self.blocks, self.passed, self.tokens, self.salts = blocks, passed, tokens, salts
        oks = [ok or parent in (-1, i) for i, (ok, parent) in enumerate(zip(oks, parents, strict=True))]
        return [pairs[row] for row in sorted(pairs)], oks

    def rollback(self, lengths: list[int]) -> tuple[list[Pair], list[bool]]:
        def cut(i: int) -> bool:
            return lengths[i] < self.lengths[i] and lengths[i] % self.block_size > 0

        def copied(i: int) -> list[int]:
            """The rows whose last block others hold too."""
            if not cut(i):
                return []
            last = {row: self.blocks[row][lengths[i] // self.block_size] for row in self.rows_of(i)}
            return [row for row, block in last.items() if self.holders[block] > 1 or block in self.cached]

        def reachable(i: int) -> bool:
            return lengths[i] == 0 or all(self.passed[r] <= self.seen_from(r, lengths[i]) for r in self.rows_of(i))

        seqs = range(len(lengths))
        legal = [0 <= lengths[i] <= self.lengths[i] and reachable(i) for i in seqs]
        copies = [copied(i) if legal[i] else [] for i in seqs]
        oks = self.grant([len(copies[i]) if legal[i] else None for i in seqs])
        pairs: dict[int, Pair] = {}
        gone: list[list[int]] = [[] for _ in self.blocks]
        given_up = []
        for i in (i for i in seqs if oks[i]):
            kept = self.num_blocks_for(lengths[i])
            for row in self.rows_of(i):
                self.passed[row] = self.passed[row] if kept else 0
                gone[row] = [block for block in self.blocks[row][kept:] if block]
                self.blocks[row] = self.blocks[row][:kept]
                if row in copies[i]:
                    source = self.blocks[row][-1]
                    gone[row] = [source, *gone[row]]
                    self.blocks[row][-1] = self.take()
                    pairs[row] = (source, self.blocks[row][-1])
                elif cut(i):
                    given_up.append(self.blocks[row][-1])
        self.let_go(gone)
        self.num_drops.update(given_up)
        self.tokens = [tokens[: lengths[i]] if oks[i] else tokens for i, tokens in enumerate(self.tokens)]
        return [pairs[row] for row in sorted(pairs)], oks

    # The prefix cache.

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
            while hits and any(None in blocks for blocks in self.beginnings(i, hits)):
                hits.pop()
            num_cached.append(len(hits) * self.block_size)
            if hits:
                self.tokens[i], self.salts[i] = prompt[: num_cached[i]], salts[i]
                for row, blocks in zip(self.rows_of(i), self.beginnings(i, hits), strict=True):
                    self.passed[row] = self.seen_from(row, num_cached[i])
                    self.blocks[row] = [0] * self.passed[row] + blocks
                    for block in blocks:
                        self.acquire(block)
        return num_cached

    def beginnings(self, seq: int, hits: list[int]) -> list[list]:
        """The blocks of each row that begins with these of the first group; None: not cached."""
        found = []
        for group, row in enumerate(self.rows_of(seq)):
            columns = range(self.seen_from(row, len(hits) * self.block_size), len(hits))
            found.append([hits[c] if group == 0 else self.companions.get((group, hits[c])) for c in columns])
        return found

    def insert(self, width: int) -> None:
        found = {key: block for block, key in self.cached.items()}
        gone: list[list[int]] = [[] for _ in self.tokens]
        taken = []
        for i, tokens in enumerate(self.tokens):
            for column in range(min(len(tokens), width if len(tokens) <= width else 0) // self.block_size):
                key, own = self.key(self.salts[i], tokens, column), self.blocks[i][column]
                if key not in found:
                    found[key] = own
                    self.cached[own] = key
                elif found[key] != own:
                    taken.append(found[key])
                    gone[i].append(own)
                    self.blocks[i][column] = found[key]
        for block in taken:
            self.acquire(block)
        self.let_go(gone)
        self.insert_companions(width)

    def insert_companions(self, width: int) -> None:
        gone: list[list[int]] = [[] for _ in self.blocks]
        taken = []
        for row in range(self.num_seqs, len(self.blocks)):
            group, seq = divmod(row, self.num_seqs)
            length = self.lengths[seq] if self.lengths[seq] <= width else 0
            for column in range(self.passed[row], length // self.block_size):
                first, own = self.blocks[seq][column], self.blocks[row][column]
                companion = self.companions.setdefault((group, first), own)
                if companion == own:
                    salt, *tokens = self.cached[first]
                    self.cached[own] = ((salt, group), *tokens)
                else:
                    taken.append(companion)
                    gone[row].append(own)
                    self.blocks[row][column] = companion
        for block in taken:
            self.acquire(block)
        self.let_go(gone)

    def clear(self) -> None:
        self.cached, self.companions, self.num_waiting = {}, {}, 0

    # Going back to a copy of an earlier model.

    def has_freed_nothing_of(self, old: "Model") -> bool:
        """Whether nothing that the old one's sequences hold was dropped since."""
        rows = range(len(old.blocks))
        return all(self.num_drops[block] == old.num_drops[block] for row in rows for block in old.held(row))

    def gone_back(self, old: "Model") -> "Model":
        """The old one, its prefix cache cleared. All tokens outside its full blocks count as dropped."""
        new = copy.deepcopy(old)
        new.clear()
        num_full = [length // self.block_size for length in old.lengths] * len(old.windows)
        kept = {block for blocks, n in zip(old.blocks, num_full, strict=True) for block in blocks[:n]}
        new.num_drops = Counter(
            {block: self.num_drops[block] + (block not in kept) for block in range(self.num_blocks)}
        )
        return new
