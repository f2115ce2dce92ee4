"""Random histories of the cache against a model that is too simple to be wrong.

The model keeps, per sequence, a list of tokens and a list of block objects, and handles one token at a time.  After
each step the cache must show the same tokens in its arrays and the same sharing of blocks.
"""

from collections import Counter
from itertools import islice

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import settings
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, multiple, rule
from paged_kv_cache.tokens import LAYOUTS, read_tokens, write_tokens

import pykv


class Model:
    def __init__(self, block_size):
        self.block_size = block_size
        self.tokens = {}
        self.blocks = {}

    def copy(self):
        other = Model(self.block_size)
        other.tokens = {seq: list(tokens) for seq, tokens in self.tokens.items()}
        other.blocks = {seq: list(blocks) for seq, blocks in self.blocks.items()}
        return other

    def owners(self):
        return Counter(block for blocks in self.blocks.values() for block in blocks)

    def append(self, seq, values):
        tokens, blocks = self.tokens.setdefault(seq, []), self.blocks.setdefault(seq, [])
        for value in values:
            if len(tokens) % self.block_size == 0:
                blocks.append(object())
            elif self.owners()[blocks[-1]] > 1:
                blocks[-1] = object()
            tokens.append(value)

    def fork(self, parent, child):
        self.tokens[child], self.blocks[child] = list(self.tokens[parent]), list(self.blocks[parent])

    def truncate(self, seq, length):
        del self.tokens[seq][length:]
        del self.blocks[seq][-(-length // self.block_size) :]

    def free(self, seq):
        del self.tokens[seq], self.blocks[seq]


class Histories(RuleBasedStateMachine):
    seqs = Bundle("seqs")

    @initialize(
        num_blocks=st.integers(1, 24),
        block_size=st.integers(1, 5),
        layout=st.sampled_from(LAYOUTS),
    )
    def begin(self, num_blocks, block_size, layout):
        self.kv = pykv.PagedKVCache(2, num_blocks, block_size, 1, 4, "float32", layout)
        self.model = Model(block_size)
        self.next_id = 0
        self.next_value = 1

    def new_id(self):
        self.next_id += 1
        return 7 * self.next_id - 20

    @rule(target=seqs, known=st.lists(seqs, max_size=5, unique=True), counts=st.lists(st.integers(0, 12), max_size=7))
    def append(self, known, counts):
        known = known[: len(counts)]
        new = [self.new_id() for _ in counts[len(known) :]]
        return multiple(*new) if self.grow(known + new, counts) else multiple()

    @rule(count=st.integers(0, 3), backwards=st.booleans())
    def decode(self, count, backwards):
        """Every sequence grows, so that readers of one block write at once."""
        ids = list(self.model.tokens)[:: -1 if backwards else 1]
        self.grow(ids, [count] * len(ids))

    def grow(self, ids, counts):
        values = [float(self.next_value + i) for i in range(sum(counts))]
        self.next_value += len(values)
        wanted, rest = self.model.copy(), iter(values)
        for seq, count in zip(ids, counts, strict=True):
            wanted.append(seq, list(islice(rest, count)))
        if len(wanted.owners()) > self.kv.num_blocks:
            with pytest.raises(pykv.OutOfBlocks):
                self.kv.append(ids, counts)
            assert [seq in self.kv for seq in ids] == [seq in self.model.tokens for seq in ids]
            return False
        slots = self.kv.append(ids, counts)
        assert slots.dtype == np.int64
        assert len(set(slots.tolist())) == slots.size == len(values)
        write_tokens(self.kv, slots, values)
        self.model = wanted
        return True

    @rule(target=seqs, parent=seqs)
    def fork(self, parent):
        child = self.new_id()
        self.kv.fork(parent, child)
        self.model.fork(parent, child)
        return child

    @rule(seq=seqs, data=st.data())
    def truncate(self, seq, data):
        length = data.draw(st.integers(0, len(self.model.tokens[seq])))
        self.kv.truncate(seq, length)
        self.model.truncate(seq, length)

    @rule(gone=st.lists(consumes(seqs), max_size=3))
    def free(self, gone):
        self.kv.free(gone)
        for seq in gone:
            self.model.free(seq)

    @invariant()
    def same_tokens(self):
        for seq, tokens in self.model.tokens.items():
            assert read_tokens(self.kv, seq) == tokens

    @invariant()
    def same_sharing(self):
        ids = list(self.model.tokens)
        tables, lengths = self.kv.block_tables(ids), self.kv.seq_lens(ids)
        assert tables.dtype == lengths.dtype == np.int32
        assert lengths.tolist() == [len(self.model.tokens[seq]) for seq in ids]
        width = max((len(self.model.blocks[seq]) for seq in ids), default=0)
        assert tables.shape == (len(ids), width)
        pairs = set()
        for table, seq in zip(tables.tolist(), ids, strict=True):
            blocks = self.model.blocks[seq]
            assert table[len(blocks) :] == [-1] * (width - len(blocks))
            pairs.update(zip(table, blocks, strict=False))
        assert len(pairs) == len({real for real, _ in pairs}) == len({block for _, block in pairs})

    @invariant()
    def nothing_leaks(self):
        owners = self.model.owners()
        assert self.kv.num_free_blocks == self.kv.num_blocks - len(owners)
        assert self.kv.usage == pytest.approx(len(owners) / self.kv.num_blocks)

    def teardown(self):
        """Whatever happened, freeing all gives all blocks back, once each."""
        if hasattr(self, "kv"):
            self.kv.free(list(self.model.tokens))
            self.kv.append(0, self.kv.num_blocks * self.kv.block_size)
            assert sorted(self.kv.block_tables(0)[0].tolist()) == list(range(self.kv.num_blocks))


TestHistories = Histories.TestCase
TestHistories.settings = settings(max_examples=150, stateful_step_count=30, deadline=None)
