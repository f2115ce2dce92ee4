"""What a cache should do, too simple to be wrong: lists of tokens and of block objects, one token at a time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable


class Block:
    """Equal to itself alone."""


class Model:
    def __init__(self, num_blocks: int, block_size: int, num_host_blocks: int) -> None:
        self.num_blocks, self.block_size, self.num_host_blocks = num_blocks, block_size, num_host_blocks
        self.tokens: dict[int, list[float]] = {}
        self.blocks: dict[int, list[Block]] = {}
        self.swapped: dict[int, list[Block]] = {}  # those of the host; a sequence is here or in `blocks`
        self.said: dict[int, int] = {}  # how many first blocks of a sequence were committed
        self.names: dict[Block, tuple[float, ...]] = {}  # a block -> the prefix whose end it holds
        self.idle: list[Block] = []  # found by a prefix and without owner, the next to be taken first
        self.evicted = 0

    def copy(self) -> Model:
        other = Model(self.num_blocks, self.block_size, self.num_host_blocks)
        other.tokens = {seq: list(tokens) for seq, tokens in self.tokens.items()}
        other.blocks = {seq: list(blocks) for seq, blocks in self.blocks.items()}
        other.swapped = {seq: list(blocks) for seq, blocks in self.swapped.items()}
        other.said, other.names, other.idle = dict(self.said), dict(self.names), list(self.idle)
        other.evicted = self.evicted
        return other

    def owners(self) -> Counter[Block]:
        return Counter(block for blocks in self.blocks.values() for block in blocks)

    def host_owners(self) -> Counter[Block]:
        return Counter(block for blocks in self.swapped.values() for block in blocks)

    def fits(self) -> bool:
        return len(self.owners()) <= self.num_blocks and len(self.host_owners()) <= self.num_host_blocks

    def forget(self, block: Block) -> None:
        self.names.pop(block, None)

    def new_block(self) -> Block:
        """Room for it is made at the cost of what might still have been found."""
        if self.idle and len(self.owners()) + len(self.idle) >= self.num_blocks:
            self.forget(self.idle.pop(0))
            self.evicted += 1
        return Block()

    def drop(self, mentions: list[Block]) -> None:
        """These are owned once less each, in this order from beginnings to ends; the ends are taken first."""
        owners = self.owners()
        for block in dict.fromkeys(reversed(mentions)):
            if not owners[block] and block in self.names:
                self.idle.append(block)

    def append(self, seq: int, values: Iterable[float]) -> None:
        tokens, blocks = self.tokens.setdefault(seq, []), self.blocks.setdefault(seq, [])
        for value in values:
            if len(tokens) % self.block_size == 0:
                blocks.append(self.new_block())
            elif self.owners()[blocks[-1]] > 1:
                blocks[-1] = self.new_block()
            self.forget(blocks[-1])
            tokens.append(value)

    def fork(self, parent: int, child: int) -> None:
        self.tokens[child], self.blocks[child] = list(self.tokens[parent]), list(self.blocks[parent])
        self.said[child] = self.said.get(parent, 0)

    def truncate(self, seq: int, length: int) -> None:
        dropped = self.blocks[seq][-(-length // self.block_size) :]
        del self.tokens[seq][length:]
        del self.blocks[seq][-(-length // self.block_size) :]
        self.said[seq] = min(self.said.get(seq, 0), length // self.block_size)
        self.drop(dropped)

    def free(self, seqs: list[int]) -> None:
        mentions = [block for seq in seqs for block in self.blocks.pop(seq, [])]
        for seq in seqs:
            del self.tokens[seq]
            self.swapped.pop(seq, None)
            self.said.pop(seq, None)
        self.drop(mentions)

    def prefix(self, tokens: list[float]) -> list[Block]:
        """Of several blocks with one content, the first of those with most readers."""
        blocks: list[Block] = []
        for end in range(self.block_size, len(tokens) + 1, self.block_size):
            twins = [block for block, prefix in self.names.items() if prefix == tuple(tokens[:end])]
            if not twins:
                break
            blocks.append(max(twins, key=self.owners().__getitem__))
        return blocks

    def reuse(self, seq: int, tokens: list[float]) -> None:
        blocks = self.prefix(tokens)
        self.idle = [block for block in self.idle if block not in blocks]
        self.blocks[seq], self.tokens[seq] = blocks, tokens[: len(blocks) * self.block_size]
        self.said[seq] = len(blocks)

    def commit(self, seq: int) -> None:
        full = len(self.tokens[seq]) // self.block_size
        for i in range(self.said.get(seq, 0), full):
            prefix, block = tuple(self.tokens[seq][: (i + 1) * self.block_size]), self.blocks[seq][i]
            self.names.setdefault(block, prefix)
        self.said[seq] = max(self.said.get(seq, 0), full)

    def swap_out(self, seqs: list[int]) -> None:
        there: dict[Block, Block] = {}
        mentions = [block for seq in seqs for block in self.blocks[seq]]
        for seq in seqs:
            self.swapped[seq] = [there.setdefault(block, Block()) for block in self.blocks.pop(seq)]
            self.said.pop(seq, None)
        self.drop(mentions)

    def swap_in(self, seqs: list[int]) -> None:
        here: dict[Block, Block] = {}
        for seq in seqs:
            leaving, self.blocks[seq] = self.swapped.pop(seq), []
            for block in leaving:
                if block not in here:
                    here[block] = self.new_block()
                self.blocks[seq].append(here[block])

    def load(self, seqs: list[int], ids: list[int]) -> None:
        """New sequences with the tokens of others, of which they share nothing but what those share."""
        here: dict[Block, Block] = {}
        for seq, new_id in zip(seqs, ids, strict=True):
            self.tokens[new_id], self.blocks[new_id] = list(self.tokens[seq]), []
            for block in self.blocks[seq]:
                if block not in here:
                    here[block] = self.new_block()
                self.blocks[new_id].append(here[block])
