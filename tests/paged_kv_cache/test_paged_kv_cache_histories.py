"""Random histories of the cache against the model.

After each step the cache must show the same tokens in its arrays, the same sharing of blocks and the same prefixes.
"""

import tempfile
from itertools import islice

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import settings
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, multiple, rule
from paged_kv_cache.late_copies import copy_late
from paged_kv_cache.model import Model
from paged_kv_cache.tokens import LAYOUTS, read_tokens, write_tokens

import pykv


class Histories(RuleBasedStateMachine):
    seqs = Bundle("seqs")
    prefix_caching = False
    copies_are_late = False

    @initialize(
        num_blocks=st.integers(1, 24),
        block_size=st.integers(1, 5),
        num_host_blocks=st.integers(0, 12),
        layout=st.sampled_from(LAYOUTS),
    )
    def begin(self, num_blocks, block_size, num_host_blocks, layout):
        if self.prefix_caching:  # prefixes of several blocks shall be frequent
            num_blocks, block_size = num_blocks + 6, (block_size + 3) // 2
        self.kv = pykv.PagedKVCache(
            2,
            num_blocks,
            block_size,
            1,
            4,
            "float32",
            layout,
            prefix_caching=self.prefix_caching,
            num_host_blocks=num_host_blocks,
        )
        self.side = copy_late(self.kv) if self.copies_are_late else None
        self.model = Model(num_blocks, block_size, num_host_blocks)
        self.prompts = [[]]  # what was committed once, and may be asked for again
        self.next_id = 0
        self.next_value = 1

    def new_id(self):
        self.next_id += 1
        return 7 * self.next_id - 20

    def new_values(self, count):
        self.next_value += count
        return list(range(self.next_value - count, self.next_value))

    def here(self, seqs):
        return [seq for seq in dict.fromkeys(seqs) if seq in self.model.blocks]

    @rule(target=seqs, known=st.lists(seqs, max_size=5), counts=st.lists(st.integers(0, 12), max_size=7))
    def append(self, known, counts):
        known = self.here(known)[: len(counts)]
        new = [self.new_id() for _ in counts[len(known) :]]
        values = [self.new_values(count) for count in counts]
        return multiple(*new) if self.grow(known + new, values) else multiple()

    @rule(count=st.integers(0, 3), backwards=st.booleans())
    def decode(self, count, backwards):
        """Every sequence grows, so that readers of one block write at once."""
        ids = list(self.model.blocks)[:: -1 if backwards else 1]
        self.grow(ids, [self.new_values(count) for _ in ids])

    def grow(self, ids, values):
        wanted = self.model.copy()
        for seq, more in zip(ids, values, strict=True):
            wanted.append(seq, more)
        counts, flat = [len(more) for more in values], [value for more in values for value in more]
        if not wanted.fits():
            with pytest.raises(pykv.OutOfBlocks):
                self.kv.append(ids, counts)
            assert [seq in self.kv for seq in ids] == [seq in self.model.tokens for seq in ids]
            return False
        slots = self.kv.append(ids, counts)
        assert slots.dtype == np.int64
        assert len(set(slots.tolist())) == slots.size == len(flat)
        write_tokens(self.kv, slots, flat)
        self.model = wanted
        return True

    @rule(target=seqs, parent=seqs)
    def fork(self, parent):
        child = self.new_id()
        if parent in self.model.swapped:
            with pytest.raises(ValueError, match="is swapped out"):
                self.kv.fork(parent, child)
            return multiple()
        self.kv.fork(parent, child)
        self.model.fork(parent, child)
        return child

    @rule(seq=seqs, data=st.data())
    def truncate(self, seq, data):
        length = data.draw(st.integers(0, len(self.model.tokens[seq])))
        if seq in self.model.swapped:
            with pytest.raises(ValueError, match="is swapped out"):
                self.kv.truncate(seq, length)
        else:
            self.kv.truncate(seq, length)
            self.model.truncate(seq, length)

    @rule(seq=seqs, count=st.integers(1, 3))
    def reconsider(self, seq, count):
        """Other tokens in place of the last ones, as after a wrong guess."""
        if seq in self.model.blocks:
            length = max(0, len(self.model.tokens[seq]) - count)
            self.kv.truncate(seq, length)
            self.model.truncate(seq, length)
            self.grow([seq], [self.new_values(count)])

    @rule(gone=st.lists(consumes(seqs), max_size=3))
    def leave(self, gone):
        self.free(gone)

    def free(self, gone):
        self.kv.free(gone)
        self.model.free(gone)

    @rule(seqs=st.lists(seqs, min_size=1, max_size=4))
    def swap_out(self, seqs):
        seqs, wanted = self.here(seqs), self.model.copy()
        wanted.swap_out(seqs)
        self.swap(self.kv.swap_out, seqs, wanted)

    @rule(seqs=st.lists(seqs, min_size=1, max_size=4))
    def swap_in(self, seqs):
        seqs, wanted = [s for s in dict.fromkeys(seqs) if s in self.model.swapped], self.model.copy()
        wanted.swap_in(seqs)
        self.swap(self.kv.swap_in, seqs, wanted)

    @rule(target=seqs, seqs=st.lists(seqs, min_size=1, max_size=4))
    def save_and_load(self, seqs):
        seqs, wanted = self.here(seqs), self.model.copy()
        ids = [self.new_id() for _ in seqs]
        wanted.load(seqs, ids)
        with tempfile.TemporaryDirectory() as folder:
            self.kv.save(f"{folder}/sequences", seqs)
            self.swap(lambda ids: self.kv.load(f"{folder}/sequences", ids), ids, wanted)
        return multiple(*[seq for seq in ids if seq in self.model.tokens])

    def swap(self, move, seqs, wanted):
        if wanted.fits():
            move(seqs)
            self.model = wanted
        else:
            with pytest.raises(pykv.OutOfBlocks):
                move(seqs)

    @invariant()
    def same_tokens(self):
        assert all(seq in self.kv for seq in self.model.tokens)
        for seq, tokens in self.model.tokens.items():
            assert self.kv.is_swapped_out(seq) == (seq in self.model.swapped)
            if seq in self.model.blocks:
                assert read_tokens(self.kv, seq) == tokens

    @invariant()
    def same_sharing(self):
        ids = list(self.model.blocks)
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
        assert self.kv.num_free_host_blocks == self.kv.num_host_blocks - len(self.model.host_owners())

    def teardown(self):
        """Whatever happened, freeing all gives all blocks back, once each."""
        if hasattr(self, "kv"):
            self.kv.free(list(self.model.tokens))
            assert self.kv.num_free_host_blocks == self.kv.num_host_blocks
            self.kv.append(0, self.kv.num_blocks * self.kv.block_size)
            assert sorted(self.kv.block_tables(0)[0].tolist()) == list(range(self.kv.num_blocks))


class PrefixHistories(Histories):
    """The same with prefix reuse; most sequences begin like a former one."""

    prefix_caching = True

    def say(self, seq, ahead=()):
        self.prompts.append(list(self.model.tokens[seq]))
        self.kv.commit_prefix(seq, [*self.model.tokens[seq], *ahead])
        self.model.commit(seq)

    @rule(seq=Histories.seqs, ahead=st.integers(0, 3))
    def commit(self, seq, ahead):
        """What a sequence will hold later may be said, too, and is ignored."""
        if seq in self.model.blocks:
            self.say(seq, [-1] * ahead)

    @rule(
        target=Histories.seqs,
        back=st.integers(1, 4),
        cut=st.integers(0, 4),
        more=st.integers(0, 9),
        then=st.sampled_from(["go on", "say", "say and leave"]),
    )
    def reuse(self, back, cut, more, then):
        """A prompt like a recent one, up to a place near its end; then what is not there is computed."""
        prompt = self.prompts[-min(back, len(self.prompts))]
        prompt = prompt[: max(0, len(prompt) - cut)] + self.new_values(more)
        seq = self.new_id()
        found = self.kv.reuse_prefix(seq, prompt)
        self.model.reuse(seq, prompt)
        assert found == len(self.model.tokens[seq])
        if self.grow([seq], [prompt[found:]]) and then != "go on":
            self.say(seq)
            if then == "say and leave":
                self.free([seq])
                return multiple()
        return seq

    @invariant()
    def same_prefixes(self):
        for prompt in islice(reversed(self.prompts), 10):
            assert self.kv.match_prefix(prompt) == len(self.model.prefix(prompt)) * self.model.block_size
        assert self.kv.num_cached_blocks == len(set(self.model.names.values()))
        assert self.kv.prefix_stats.evicted_blocks == self.model.evicted


class LateHistories(PrefixHistories):
    """The same with copies that come as late as they may, a few of them earlier.

    Looking at all sequences after each step would leave nothing to put off: one of them is looked at now and then.
    """

    copies_are_late = True

    @rule(count=st.integers(1, 3))
    def some_copies_finish(self, count):
        self.side.finish(min(self.side.started, self.side.finished + count))

    @rule(seq=Histories.seqs)
    def look(self, seq):
        if seq in self.model.blocks:
            assert read_tokens(self.kv, seq) == self.model.tokens[seq]

    def same_tokens(self):
        pass

    def same_sharing(self):
        pass

    def teardown(self):
        if hasattr(self, "kv"):
            Histories.same_tokens(self)
        super().teardown()


TestHistories = Histories.TestCase
TestHistories.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
TestPrefixHistories = PrefixHistories.TestCase
TestPrefixHistories.settings = settings(max_examples=200, stateful_step_count=50, deadline=None)
TestLateHistories = LateHistories.TestCase
TestLateHistories.settings = settings(max_examples=150, stateful_step_count=50, deadline=None)
