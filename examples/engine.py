"""Continuous batching over a paged KV cache: every step computes whatever is due, of whichever sequences are there.

A step has room for a number of tokens.  Sequences that decode take one each; what is left goes to prompts, cut into
chunks where they do not fit, and to sequences that wait to join.  A sequence that ends leaves its blocks to the others.
If blocks run out, the youngest sequence gives up its own and is computed again later.

A GPU gets the next step before the host knows the tokens of this one: they stay on the device, and all else of the next
batch is known by then.  So the GPU does not wait for the host.  A sequence that has ended is computed once too often,
and that result is dropped.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import takewhile

import numpy as np
from arrays import Array, Host
from llama import Llama
from steps import Batch

import pykv


@dataclass(eq=False)  # one is like no other
class Request:
    id: int
    tokens: list[int]  # the prompt, then what was generated
    max_length: int
    temperature: float
    seed: int  # its own, so that its neighbours in a batch do not matter
    prompt_length: int = field(init=False)
    cached: int = 0  # tokens whose keys and values the cache holds
    finished: bool = False

    def __post_init__(self) -> None:
        self.prompt_length = len(self.tokens)

    @property
    def due(self) -> int:
        """Tokens to compute before the next one can be chosen."""
        return len(self.tokens) - self.cached


@dataclass
class Counters:
    steps: int = 0
    prompt_tokens: int = 0  # computed; those of a shared prefix count once
    decoded_tokens: int = 0  # computed behind prompts
    generated_tokens: int = 0
    preemptions: int = 0
    peak_blocks: int = 0


@dataclass
class Prepared:
    """A step for which the cache has made room."""

    requests: list[Request]
    ends: list[int]  # how much of each will be cached
    batch: Batch  # its tokens are put in when it starts


@dataclass
class Started:
    """A step that the device computes, or has computed."""

    prepared: Prepared
    ready: list[Request]  # those that get a token by it
    chosen: Array  # these tokens
    read: Callable[[], Host]  # waits for them


def common_prefix(prompts: list[list[int]]) -> list[int]:
    """The tokens with which all prompts begin, short of the last one of any prompt: that one is left to compute."""
    alike = takewhile(lambda column: len(set(column)) == 1, zip(*prompts, strict=False))
    return [column[0] for column in alike][: min(map(len, prompts)) - 1]


class Engine:
    PREFIX = -1  # the id of the shared prefix, which is a sequence like the others

    def __init__(self, model: Llama, cache: pykv.PagedKVCache, tokens_per_step: int = 256):
        self.model, self.cache = model, cache
        self.tokens_per_step = tokens_per_step
        self.prefix: list[int] = []
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self.counters = Counters()
        self._ids = 0
        self._ahead: Started | None = None

    def share_prefix(self, tokens: list[int]) -> None:
        """Compute ``tokens`` once; requests that begin with them, and go on, fork the cached blocks."""
        self.close()
        holder = Request(self.PREFIX, list(tokens), len(tokens), 0.0, 0)
        for begin in range(0, len(tokens), self.tokens_per_step):
            prepared = self._prepare([(holder, min(self.tokens_per_step, len(tokens) - begin))])
            self._start(prepared)
            self._count(prepared)
        self.prefix = list(tokens)

    def add(self, tokens: list[int], max_new_tokens: int, temperature: float = 0.0, seed: int = 0) -> Request:
        """A new request; it joins in a later step.  Temperature 0 takes the likeliest token always."""
        if not 0 < len(tokens) < self.model.config.max_length:
            raise ValueError(f"a prompt must have 1 to {self.model.config.max_length - 1} tokens, got {len(tokens)}")
        max_length = min(len(tokens) + max_new_tokens, self.model.config.max_length)
        request = Request(self._ids, list(tokens), max_length, temperature, (seed + self._ids) % 2**31)
        request.finished = max_new_tokens == 0
        self._ids += 1
        if not request.finished:
            self.waiting.append(request)
        return request

    @property
    def busy(self) -> bool:
        return bool(self.waiting or self.running)

    def step(self) -> list[Request]:
        """Compute one batch; returns the requests that got a token."""
        step, self._ahead = self._ahead, None
        if step is None or all(request.finished for request in step.ready):
            prepared = self._next()
            if prepared is None:
                return []
            step = self._start(prepared)
        self._count(step.prepared)
        self._ahead = self._start_ahead(step)
        got = []
        for request, token in zip(step.ready, step.read(), strict=True):
            if request.finished:  # by the step before, of which nobody knew
                continue
            request.tokens.append(int(token))
            got.append(request)
            if token in self.model.config.end_ids or len(request.tokens) >= request.max_length:
                self.end(request)
        self.counters.generated_tokens += len(got)
        return got

    def end(self, request: Request) -> None:
        """No more tokens for it; its blocks are free.  A step under way may still write there, before others do."""
        request.finished = True
        if request in self.waiting:
            self.waiting.remove(request)
        if request in self.running:
            self._leave(request)

    def close(self) -> None:
        """Give the blocks of the shared prefix back."""
        if self.prefix:
            self.cache.free([self.PREFIX])
            self.prefix = []

    def _next(self) -> Prepared | None:
        """The next step, after some gave way if the cache is full; None if all that were to compute did."""
        plan = self._plan()
        while plan:
            try:
                return self._prepare(plan)
            except pykv.OutOfBlocks:  # raised before anything changed
                if len(self.running) == 1:
                    raise
                self._preempt(self.running[-1])
                plan = [(request, count) for request, count in plan if request in self.running]
        return None

    def _start_ahead(self, step: Started) -> Started | None:
        """The step after ``step``, if ``step`` gives a token to all that run and brings none to its greatest length."""
        if not self.model.arrays.asynchronous or (self.waiting and self._fits(self.waiting[0])):
            return None
        if len(step.ready) < len(self.running):
            return None
        if any(r.finished or r.cached + 1 >= r.max_length for r in step.ready):
            return None
        try:
            return self._start(self._prepare([(request, 1) for request in step.ready]), step.chosen)
        except pykv.OutOfBlocks:
            return None

    def _plan(self) -> list[tuple[Request, int]]:
        """Who computes how many tokens in this step."""
        room = self.tokens_per_step
        plan = []
        for request in sorted(self.running, key=lambda r: r.due > 1):  # decoding first, then the rest of prompts
            if room:
                plan.append((request, min(request.due, room)))
                room -= plan[-1][1]
        while room and self.waiting and (self._fits(self.waiting[0]) or not self.running):
            request = self.waiting.popleft()
            shared = len(self.prefix)
            if 0 < shared < len(request.tokens) and request.tokens[:shared] == self.prefix:
                self.cache.fork(self.PREFIX, request.id)
                request.cached = shared
            self.running.append(request)
            plan.append((request, min(request.due, room)))
            room -= plan[-1][1]
        return plan

    def _fits(self, request: Request) -> bool:
        """Whether the cache has room for the request's tokens, and one block more to grow into."""
        promised = sum(self._blocks(len(r.tokens)) - self._blocks(r.cached) for r in self.running)
        return promised + self._blocks(len(request.tokens)) + 1 <= self.cache.num_free_blocks

    def _blocks(self, num_tokens: int) -> int:
        return -(-num_tokens // self.cache.block_size)

    def _leave(self, request: Request) -> None:
        self.running.remove(request)
        if request.id in self.cache:  # not if there was no room to begin it
            self.cache.free([request.id])
        request.cached = 0

    def _preempt(self, request: Request) -> None:
        self._leave(request)
        self.waiting.appendleft(request)
        self.counters.preemptions += 1

    def _prepare(self, plan: list[tuple[Request, int]]) -> Prepared:
        """Room in the cache for the next tokens of each request; which tokens these are may come later."""
        put = self.model.arrays.put
        requests, counts = [r for r, _ in plan], np.array([n for _, n in plan])
        ids = [r.id for r in requests]
        rows, ends = np.cumsum(counts), [r.cached + n for r, n in plan]
        ready = np.array([end >= len(r.tokens) for r, end in zip(requests, ends, strict=True)])
        slots = self.cache.append(ids, counts)
        batch = Batch(
            tokens=None,
            positions=put(np.concatenate([np.arange(end - n, end) for n, end in zip(counts, ends, strict=True)])),
            slots=slots,
            cu_query_lens=put(np.concatenate(([0], rows)).astype(np.int32)),
            seq_lens=self.cache.seq_lens(ids),
            block_tables=self.cache.block_tables(ids),
            wanted=put(rows[ready] - 1),
        )
        return Prepared(requests, ends, batch)

    def _start(self, prepared: Prepared, tokens: Array | None = None) -> Started:
        """The model over the tokens of each request, or ``tokens``, and a draw for those that are ready for one."""
        arrays, ends = self.model.arrays, prepared.ends
        if tokens is None:
            spans = zip(prepared.requests, ends, strict=True)
            tokens = arrays.put(np.concatenate([np.array(r.tokens[r.cached : end]) for r, end in spans]))
        logits = self.model.forward(replace(prepared.batch, tokens=tokens), self.cache)
        ready = [(r, end) for r, end in zip(prepared.requests, ends, strict=True) if end >= len(r.tokens)]
        # a draw depends on the request's seed and the number of its tokens
        chosen = arrays.sample(
            logits,
            np.array([r.seed for r, _ in ready], np.int32),
            np.array([end for _, end in ready], np.int32),
            np.array([r.temperature for r, _ in ready], np.float32),
        )
        return Started(prepared, [r for r, _ in ready], chosen, arrays.reader(chosen))

    def _count(self, prepared: Prepared) -> None:
        """What the step computes is cached, for all that comes after it."""
        for request, end in zip(prepared.requests, prepared.ends, strict=True):
            if request.finished:
                continue
            of_prompt = max(0, min(end, request.prompt_length) - request.cached)
            self.counters.prompt_tokens += of_prompt
            self.counters.decoded_tokens += end - request.cached - of_prompt
            request.cached = end
        self.counters.steps += 1
        self.counters.peak_blocks = max(self.counters.peak_blocks, self.cache.num_blocks - self.cache.num_free_blocks)
