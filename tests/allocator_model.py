"""What the allocator and its prefix cache must do, in dicts and lists, one sequence after the other."""

import copy
from collections import Counter

Pair = tuple[int, int]


class Model:
    def __init__(self, num_blocks: int, block_size: int, num_seqs: int, max_blocks: int):
        self.num_blocks, self.block_size, self.max_blocks = num_blocks, block_size, max_blocks
        self.free = list(range(num_blocks - 1, 0, -1))  # the next one last
        self.num_waiting = 0  # of them, from the start
        self.holders: Counter[int] = Counter()
        self.num_drops: Counter[int] = Counter()  # how often a block's tokens were dropped
        self.cached: dict[int, tuple] = {}  # block -> (salt, all tokens up to its end)
        self.blocks: list[list[int]] = [[] for _ in range(num_seqs)]
        self.tokens: list[list[int]] = [[] for _ in range(num_seqs)]  # what was written, for the prefix cache
        self.salts = [0] * num_seqs
        self.swapped: list[list[int]] = [[] for _ in range(num_seqs)]  # tokens of those that are swapped out

    @property
    def lengths(self) -> list[int]:
        return [len(tokens) for tokens in self.tokens]

    def num_blocks_for(self, length: int) -> int:
        return -(-length // self.block_size)

    # The pool.

    def take(self) -> int:
        block = self.free.pop()
        if len(self.free) < self.num_waiting:
            self.num_waiting -= 1
            self.cached.pop(block, None)
        self.holders[block] = 1
        return block

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
        """`new`: the tokens of each row, `count` of them if that is legal."""
        needs: list[int | None] = []
        for i, count in enumerate(counts):
            length = self.lengths[i] + count
            legal = 0 <= count <= q_len and length <= self.max_blocks * self.block_size
            legal &= not (self.swapped[i] and count)
            needs.append(self.num_blocks_for(length) - len(self.blocks[i]) if legal else None)
        oks = self.grant(needs)
        slots: list[list[int]] = []
        for i, ok in enumerate(oks):
            start = self.lengths[i]
            if ok:
                self.blocks[i] += [self.take() for _ in range(needs[i] or 0)]
                self.tokens[i] = self.tokens[i] + new[i]
            slots.append([self.slot(i, token) for token in range(start, self.lengths[i])])
        return slots, oks

    def slot(self, row: int, token: int) -> int:
        return self.blocks[row][token // self.block_size] * self.block_size + token % self.block_size

    def free_rows(self, marked: list[bool]) -> None:
        self.let_go([blocks if mark else [] for blocks, mark in zip(self.blocks, marked, strict=True)])
        for i, mark in enumerate(marked):
            if mark:
                self.blocks[i], self.tokens[i], self.swapped[i] = [], [], []

    def fork(self, parents: list[int], replace: bool) -> tuple[list[Pair], list[bool]]:
        rows = range(len(parents))

        def legal(i: int) -> bool:
            parent = parents[i]
            return (
                parent not in (-1, i)
                and parent in rows
                and (replace or not self.blocks[i])
                and not (self.swapped[i] or self.swapped[parent])
            )

        def partial(i: int) -> bool:
            return self.lengths[parents[i]] % self.block_size > 0

        heirs = set()
        for parent in rows:
            children = [i for i in rows if legal(i) and parents[i] == parent]
            if children and legal(parent):
                heirs.add(children[0])
        if sum(legal(i) and partial(i) and i not in heirs for i in rows) > len(self.free):
            heirs = set()
        oks = self.grant([int(partial(i) and i not in heirs) if legal(i) else None for i in rows])
        old, blocks, tokens, pairs = self.blocks, list(self.blocks), list(self.tokens), []
        salts = list(self.salts)
        for i in rows:
            if not oks[i]:
                continue
            blocks[i], tokens[i], salts[i] = list(old[parents[i]]), self.tokens[parents[i]], self.salts[parents[i]]
            shared = list(blocks[i])
            if partial(i) and i not in heirs:
                source = shared.pop()
                blocks[i][-1] = self.take()
                pairs.append((source, blocks[i][-1]))
            self.holders.update(shared)
        self.let_go([old[i] if oks[i] else [] for i in rows])
        self.blocks, self.tokens, self.salts = blocks, tokens, salts
        return pairs, [ok or parent in (-1, i) for i, (ok, parent) in enumerate(zip(oks, parents, strict=True))]

    def rollback(self, lengths: list[int]) -> tuple[list[Pair], list[bool]]:
        def cut(i: int) -> bool:
            return lengths[i] < self.lengths[i] and lengths[i] % self.block_size > 0

        def copied(i: int) -> bool:
            last = self.blocks[i][lengths[i] // self.block_size]
            return self.holders[last] > 1 or last in self.cached

        rows = range(len(lengths))
        legal = [0 <= lengths[i] <= self.lengths[i] for i in rows]
        needs = [int(cut(i) and copied(i)) if legal[i] else None for i in rows]
        oks = self.grant(needs)
        pairs, gone, given_up = [], [], []
        for i in rows:
            gone.append([])
            if oks[i]:
                kept = self.num_blocks_for(lengths[i])
                gone[i] = self.blocks[i][kept:]
                self.blocks[i] = self.blocks[i][:kept]
                if needs[i]:
                    source = self.blocks[i][-1]
                    gone[i] = [source, *gone[i]]
                    self.blocks[i][-1] = self.take()
                    pairs.append((source, self.blocks[i][-1]))
                elif cut(i):
                    given_up.append(self.blocks[i][-1])
        self.let_go(gone)
        self.num_drops.update(given_up)
        self.tokens = [tokens[: lengths[i]] if oks[i] else tokens for i, tokens in enumerate(self.tokens)]
        return pairs, oks

    def swap_out(self, marked: list[bool]) -> list[list[int]]:
        marked = [mark and bool(blocks) for mark, blocks in zip(marked, self.blocks, strict=True)]
        ids = [blocks if mark else [] for blocks, mark in zip(self.blocks, marked, strict=True)]
        tokens = [self.tokens[i] if mark else self.swapped[i] for i, mark in enumerate(marked)]
        self.free_rows(marked)
        self.swapped = tokens
        return ids

    def swap_in(self, marked: list[bool]) -> tuple[list[list[int]], list[bool]]:
        rows = range(len(marked))
        legal = [marked[i] and bool(self.swapped[i]) for i in rows]
        needs = [self.num_blocks_for(len(self.swapped[i])) if legal[i] else None for i in rows]
        oks, ids = self.grant(needs), []
        for i in rows:
            ids.append([self.take() for _ in range(needs[i] or 0)] if oks[i] else [])
            if oks[i]:
                self.blocks[i], self.tokens[i], self.swapped[i] = list(ids[i]), self.swapped[i], []
        return ids, [ok or not mark for ok, mark in zip(oks, marked, strict=True)]

    # The prefix cache.

    def key(self, salt: int, tokens: list[int], column: int) -> tuple:
        return salt, *tokens[: (column + 1) * self.block_size]

    def match_prefix(self, prompts: list[list[int]], salts: list[int]) -> list[int]:
        found, num_cached = {key: block for block, key in self.cached.items()}, []
        for i, prompt in enumerate(prompts):
            hits: list[int] = []
            if prompt and not self.blocks[i] and not self.swapped[i]:
                for column in range(min((len(prompt) - 1) // self.block_size, self.max_blocks)):
                    key = self.key(salts[i], prompt, column)
                    if key not in found:
                        break
                    hits.append(found[key])
            for block in hits:
                self.acquire(block)
            num_cached.append(len(hits) * self.block_size)
            if hits:
                self.blocks[i], self.tokens[i], self.salts[i] = hits, prompt[: num_cached[i]], salts[i]
        return num_cached

    def insert(self, width: int) -> None:
        found = {key: block for block, key in self.cached.items()}
        gone: list[list[int]] = []
        taken = []
        for i, tokens in enumerate(self.tokens):
            gone.append([])
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

    def clear(self) -> None:
        self.cached, self.num_waiting = {}, 0

    # Going back to a copy of an earlier model.

    def has_freed_nothing_of(self, old: "Model") -> bool:
        """Whether nothing that the old one's sequences hold was dropped since."""
        return all(self.num_drops[block] == old.num_drops[block] for blocks in old.blocks for block in blocks)

    def gone_back(self, old: "Model") -> "Model":
        """The old one, its prefix cache cleared. All tokens outside its full blocks count as dropped."""
        new = copy.deepcopy(old)
        new.clear()
        kept = {b for blocks, n in zip(old.blocks, old.lengths, strict=True) for b in blocks[: n // self.block_size]}
        new.num_drops = Counter(
            {block: self.num_drops[block] + (block not in kept) for block in range(self.num_blocks)}
        )
        return new
