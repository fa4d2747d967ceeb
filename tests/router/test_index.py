from __future__ import annotations

from collections.abc import Iterable
from functools import reduce
from operator import xor

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from jkv.cache.keys import page_keys
from jkv.cache.pages import Tier
from jkv.router.index import GlobalIndex, TierDigest, page_hashes

ENGINES = [f"engine-{number}" for number in range(70)]  # more than one word of bits
_FEW = [*ENGINES[:3], ENGINES[66], ENGINES[69]]
# Chains with common starts, as prompts have.
_STEM = list(range(12))
_CHAINS = [
    page_keys(b"r" * 16, [*_STEM[:shared], *range(100 * branch, 100 * branch + 12 - shared)], 1)
    for branch, shared in ((1, 12), (2, 7), (3, 4), (4, 0))
]
_KEYS = sorted({key for chain in _CHAINS for key in chain})

engines = st.sampled_from(_FEW)
tiers = st.sampled_from(list(Tier))
keys = st.sets(st.sampled_from(_KEYS), max_size=25)


def _packed(keys: Iterable[bytes]) -> bytes:
    return b"".join(keys)


def _expected(
    held: dict[tuple[str, Tier], set[bytes]], engine: str, others: list[str], chain: list[bytes]
) -> list[int]:
    counts = dict.fromkeys(Tier, 0)
    for key in chain:
        readable = {Tier.L3} if any(key in held[other, Tier.L3] for other in others) else set()
        have = [tier for tier in Tier if key in held[engine, tier] or tier in readable]
        if not have:
            break
        counts[have[0]] += 1
    return [counts[tier] for tier in Tier]


class IndexMachine(RuleBasedStateMachine):
    @initialize()
    def start(self) -> None:
        self.index = GlobalIndex()
        for engine in ENGINES:  # takes the numbers up to that of the last one
            self.index.holder(engine).update(Tier.L1, _KEYS[0], b"")
            self.index.holder(engine).update(Tier.L1, b"", _KEYS[0])
        self.held = {(engine, tier): set[bytes]() for engine in ENGINES for tier in Tier}

    @rule(engine=engines, tier=tiers, added=keys, removed=keys)
    def update(self, engine: str, tier: Tier, added: set[bytes], removed: set[bytes]) -> None:
        self.index.holder(engine).update(tier, _packed(added), _packed(removed))
        self.held[engine, tier] = (self.held[engine, tier] - removed) | added

    @rule(engine=engines, which=st.sets(tiers, min_size=1))
    def clear(self, engine: str, which: set[Tier]) -> None:
        self.index.holder(engine).clear(sorted(which))
        for tier in which:
            self.held[engine, tier] = set()

    @rule(engine=engines)
    def drop(self, engine: str) -> None:
        self.index.drop(engine)
        for tier in Tier:
            self.held[engine, tier] = set()

    @rule()
    def sweep(self) -> None:
        for _ in range(1000):
            if not self.index.sweep():
                break
        else:
            raise AssertionError("the sweep does not end")
        assert self.index.pages == len(set().union(*self.held.values()))

    @rule(chain=st.sampled_from(_CHAINS), shared=st.dictionaries(engines, st.lists(engines, max_size=3)))
    def match(self, chain: list[bytes], shared: dict[str, list[str]]) -> None:
        found = self.index.match(page_hashes(_packed(chain)), _FEW, shared)
        assert found.T.tolist() == [_expected(self.held, e, shared.get(e, []), chain) for e in _FEW]

    @invariant()
    def agrees(self) -> None:
        self.index.check()
        for engine in _FEW:
            digest = self.index.holder(engine).digest()
            for tier in Tier:
                held = self.held[engine, tier]
                checksum = reduce(xor, (int.from_bytes(key[:8], "little") for key in held), 0)
                assert digest[tier] == TierDigest(pages=len(held), checksum=checksum)


TestIndex = IndexMachine.TestCase
TestIndex.settings = settings(max_examples=25, stateful_step_count=30, deadline=None)


def test_a_prefix_ends_at_the_first_page_that_is_nowhere() -> None:
    index, chain = GlobalIndex(), _CHAINS[0]
    index.holder("a").update(Tier.L1, _packed(chain[:3] + chain[6:9]), b"")
    index.holder("a").update(Tier.L2, _packed(chain[2:5]), b"")
    index.holder("b").update(Tier.L3, _packed(chain[1:]), b"")
    found = index.match(page_hashes(_packed(chain)), ["a", "b", "c"])
    assert found.T.tolist() == [[3, 2, 0], [0, 0, 0], [0, 0, 0]]
    shared = index.match(page_hashes(_packed(chain)), ["a", "b", "c"], {"a": ["b"]})
    assert shared.T.tolist() == [[6, 2, 4], [0, 0, 0], [0, 0, 0]]


@given(st.integers(0, 700), st.integers(0, 700))
@settings(max_examples=30, deadline=None)
def test_prompts_of_any_length_match(held: int, asked: int) -> None:
    chain = page_keys(b"r" * 16, range(700), 1)
    index = GlobalIndex()
    index.holder("a").update(Tier.L2, _packed(chain[:held]), b"")
    found = index.match(page_hashes(_packed(chain[:asked])), ["a"])
    assert found.tolist() == [[0], [min(held, asked)], [0]]


def test_pages_that_all_engines_share_cost_one_slot_and_one_row() -> None:
    index = GlobalIndex()
    chain = page_keys(b"r" * 16, range(10_000), 1)
    for engine in ENGINES[:64]:
        for tier in Tier:
            index.holder(engine).update(tier, _packed(chain), b"")
    assert index.pages == 10_000
    assert index.nbytes < 50 * index.pages
    for engine in ENGINES[:63]:
        index.drop(engine)
    while index.sweep():
        pass
    assert index._holders.shared == 0
    index.check()


def test_keys_of_another_size_are_refused() -> None:
    with pytest.raises(ValueError, match="16 bytes each, got 15"):
        GlobalIndex().holder("a").update(Tier.L1, b"x" * 15, b"")
