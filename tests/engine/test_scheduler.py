from __future__ import annotations

from dataclasses import dataclass, field

from hypothesis import given, settings
from hypothesis import strategies as st

from jkv.cache.l1 import L1Pool
from jkv.engine.request import EngineRequest, FinishReason, SamplingParams
from jkv.engine.scheduler import Chunk, Limits, Scheduler
from jkv.engine.sequence import Sequence

PAGE = 4


def request(prompt: list[int], max_tokens: int, **fields: object) -> EngineRequest:
    return EngineRequest(
        request_id="r",
        prompt_ids=tuple(prompt),
        sampling=SamplingParams(max_tokens=max_tokens),
        **fields,  # type: ignore[arg-type]
    )


def next_token(tokens: list[int]) -> int:
    """A stand-in for the model: any deterministic function of the whole sequence."""
    return (sum(tokens) * 7 + len(tokens)) % 5


@dataclass
class Machine:
    """Runs a scheduler against a device that is nothing but page contents, one step ahead of the host as the
    engine is.

    Every step checks that what a sequence would read from its pages is its own tokens.
    """

    scheduler: Scheduler
    contents: dict[tuple[int, int], int] = field(default_factory=dict)
    last_tokens: dict[int, int] = field(default_factory=dict)
    pending: list[tuple[Sequence, int]] = field(default_factory=list)
    finished: list[Sequence] = field(default_factory=list)
    arrivals: int = 0
    largest: int = 0

    def add(self, prompt: list[int], max_tokens: int, **fields: object) -> Sequence:
        r = request(prompt, max_tokens, **fields)
        seq = Sequence(request=r, root=r.cache_salt.encode(), arrival=self.arrivals)
        self.arrivals += 1
        self.scheduler.add(seq)
        return seq

    def step(self) -> list[Chunk]:
        chunks = self.scheduler.schedule()
        self.largest = max(self.largest, sum(c.count for c in chunks))
        for chunk in chunks:
            self._write(chunk)
        sampled = [(c.seq, self._read(c)) for c in chunks if c.sample]
        self._commit(self.pending)
        self.pending = sampled
        self.scheduler.check()
        return chunks

    def run(self, limit: int = 2000) -> None:
        for _ in range(limit):
            if not self.step() and not self.pending and self.scheduler.idle:
                return
        raise AssertionError("the scheduler does not finish")

    def _token(self, seq: Sequence, position: int) -> int:
        if position < len(seq.tokens):
            return seq.tokens[position]
        assert seq.slot is not None
        return self.last_tokens[seq.slot]

    def _write(self, chunk: Chunk) -> None:
        seq = chunk.seq
        for position in range(chunk.start, chunk.start + chunk.count):
            if position // PAGE not in chunk.frozen:
                self.contents[seq.pages[position // PAGE], position % PAGE] = self._token(seq, position)

    def _read(self, chunk: Chunk) -> int:
        seq, end = chunk.seq, chunk.start + chunk.count
        seen = [self.contents[seq.pages[p // PAGE], p % PAGE] for p in range(end)]
        assert seen == [self._token(seq, p) for p in range(end)], "a sequence reads another's tokens"
        assert seq.slot is not None
        self.last_tokens[seq.slot] = next_token(seen)
        return self.last_tokens[seq.slot]

    def _commit(self, sampled: list[tuple[Sequence, int]]) -> None:
        for seq, token in sampled:
            if seq.finish_reason is not None:
                continue
            self.scheduler.commit(seq, token)
            if len(seq.tokens) - seq.prompt_len == seq.request.sampling.max_tokens:
                self.scheduler.finish(seq, FinishReason.LENGTH)
                self.finished.append(seq)


def machine(pages: int = 64, seqs: int = 4, batched: int = 16, mixed: int = 8) -> Machine:
    limits = Limits(max_num_seqs=seqs, max_batched_tokens=batched, max_mixed_tokens=mixed)
    return Machine(Scheduler(L1Pool(pages, PAGE), limits))


def expected(prompt: list[int], max_tokens: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(max_tokens):
        tokens.append(next_token(tokens))
    return tokens


def test_a_prompt_is_cut_into_chunks_and_then_decodes() -> None:
    m = machine()
    seq = m.add(list(range(40)), 3)
    steps = [[(c.start, c.count, c.sample) for c in m.step()] for _ in range(5)]
    assert steps == [
        [(0, 16, False)],
        [(16, 16, False)],
        [(32, 8, True)],
        [(40, 1, True)],
        [(41, 1, True)],
    ]
    m.run()
    assert seq.tokens == expected(list(range(40)), 3)


def test_a_running_stream_bounds_the_chunks_beside_it() -> None:
    m = machine(mixed=8)
    m.add([1, 2, 3], 30)
    m.step()
    m.add(list(range(40)), 1)
    counts = [c.count for c in m.step()]
    assert counts == [1, 7]


def test_a_repeated_prompt_computes_its_last_token_only() -> None:
    m = machine()
    prompt = list(range(12))
    m.add(prompt, 1)
    m.run()
    again = m.add(prompt, 1)
    (chunk,) = m.step()
    assert (chunk.start, chunk.count, again.cached_tokens) == (11, 1, 11)
    assert chunk.frozen == {2}
    m.run()
    assert again.tokens == expected(prompt, 1)


def test_pages_filled_while_decoding_are_found_by_the_next_turn() -> None:
    m = machine()
    first = m.add([1, 2, 3], 10)
    m.run()
    second = m.add([*first.tokens, 9], 1)
    m.step()
    assert second.cached_tokens == 12


def test_equal_prompts_in_flight_are_computed_once() -> None:
    m = machine(batched=64, seqs=32, pages=256)
    prompt = list(range(30))
    seqs = [m.add(prompt, 1) for _ in range(32)]
    m.run()
    assert [s.cached_tokens for s in seqs] == [0] + [28] * 31
    assert all(s.tokens == expected(prompt, 1) for s in seqs)


def test_salts_and_no_cache_share_nothing() -> None:
    m = machine()
    prompt = list(range(12))
    m.add(prompt, 1, cache_salt="a")
    m.run()
    other, uncached = m.add(prompt, 1, cache_salt="b"), m.add(prompt, 1, cache_salt="a", no_cache=True)
    m.run()
    assert (other.cached_tokens, uncached.cached_tokens) == (0, 0)


def test_the_newest_is_preempted_and_resumes_as_if_it_had_not_been() -> None:
    m = machine(pages=6, seqs=2)
    old, new = m.add([1, 2, 3, 4], 16), m.add([4, 3, 2, 1], 16)
    m.run()
    assert m.scheduler.preemptions > 0
    assert new.preempted
    assert not old.preempted
    assert old.tokens == expected([1, 2, 3, 4], 16)
    assert new.tokens == expected([4, 3, 2, 1], 16)
    assert new.cached_tokens == 0, "what it found again after a preemption is no cache hit of the prompt"


def test_a_higher_priority_is_admitted_first() -> None:
    m = machine(seqs=1)
    m.add([1], 1)
    low, high = m.add([2], 1), m.add([3], 1, priority=1)
    m.run()
    assert [s for s in m.finished if s in (low, high)] == [high, low]


def test_many_streams_do_not_starve_a_prefill() -> None:
    m = machine(seqs=16, batched=32, mixed=8, pages=400)
    for i in range(12):
        m.add([i], 60)
    m.step()
    late = m.add(list(range(20)), 1)
    for _ in range(15):
        m.step()
    assert late in m.finished


prompts = st.lists(st.integers(0, 1), min_size=1, max_size=22)


@settings(deadline=None, max_examples=150)
@given(
    st.lists(
        st.tuples(prompts, st.integers(1, 9), st.booleans(), st.sampled_from(["", "s"]), st.integers(0, 1)),
        min_size=1,
        max_size=14,
    ),
    st.integers(8, 20),
    st.integers(1, 4),
    st.integers(4, 24),
    st.lists(st.tuples(st.integers(0, 13), st.integers(0, 40)), max_size=4),
)
def test_any_load_gives_every_sequence_its_own_tokens(
    load: list[tuple[list[int], int, bool, str, int]],
    pages: int,
    seqs: int,
    batched: int,
    cancels: list[tuple[int, int]],
) -> None:
    m = machine(pages=pages, seqs=seqs, batched=batched, mixed=max(batched // 2, 1))
    added = []
    for i, (prompt, max_tokens, no_cache, salt, priority) in enumerate(load):
        added.append(m.add(prompt, max_tokens, no_cache=no_cache, cache_salt=salt, priority=priority))
        if i % 3 == 0:
            m.step()
    for index, after in sorted(cancels, key=lambda c: c[1]):
        for _ in range(after // 8):
            m.step()
        if index < len(added) and added[index].finish_reason is None:
            m.scheduler.finish(added[index], FinishReason.CANCELLED)
            m.scheduler.check()
    m.run()
    assert m.largest <= max(batched, seqs)
    for seq, (prompt, max_tokens, *_) in zip(added, load, strict=True):
        if seq.finish_reason is FinishReason.LENGTH:
            assert seq.tokens == expected(prompt, max_tokens)
    counts = m.scheduler.pool.counts()
    assert counts.in_use == 0, "pages leaked"
    assert counts.free + counts.cached == counts.total
