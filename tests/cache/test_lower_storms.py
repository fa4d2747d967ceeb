"""Any order of requests, answers, failures and admin calls: what is served is right, bounds hold, nothing
stays behind.
"""

from __future__ import annotations

import math
import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jkv.cache.l1 import Offer
from jkv.cache.l3.names import page_of
from jkv.cache.l3.reasons import Reason
from jkv.cache.load import Load, PageState
from jkv.cache.pages import PageInfo
from jkv.errors import FailedPreconditionError
from tests.cache.tiers import MODEL, OWNER, Rig, prompt, rig

_READ_ENDS = (None, None, None, Reason.IO, Reason.CORRUPT, Reason.MISSING, Reason.SIZE)
_WRITE_ENDS = (None, None, None, Reason.IO, Reason.NO_SPACE, Reason.BUDGET, Reason.TIMEOUT)


class Storm:
    """Does one random thing after another and remembers what must come of it."""

    def __init__(self, r: Rig, rng: random.Random) -> None:
        self.r, self.rng = r, rng
        self.loads: dict[Load, int] = {}  # and how many pages were taken
        self.drains = self.drained = 0
        self.wanted = set(r.store.objects)  # names of what L3 may have

    def step(self) -> None:
        actions = (
            *(self.offer,) * 4,
            *(self.begin,) * 3,
            *(self.advance,) * 6,
            *(self.answer,) * 8,
            *(self.r.deliver,) * 3,
            self.end,
            self.tick,
            self.pin,
            self.unpin,
            self.drain,
            self.drop_host,
            self.remove,
            self.lose,
            self.leave_l1,
        )
        self.rng.choice(actions)()
        self.r.check()

    def finish(self) -> None:
        while self.loads:
            self.end()
        self.r.settle()
        assert self.drained == self.drains, "a drain never ends"
        self.r.check_at_rest()
        assert self.r.store.objects.keys() <= self.wanted, "L3 has pages of short prompts alone"
        self.r.lower.unpin(
            [info for family in range(6) for salt in ("", "salt") for info in prompt(family, 12, salt)]
        )
        assert not self.r.lower._pins
        assert not self.r.host.tree.pinned
        assert not self.r.disk.tree.pinned

    def infos(self) -> list[PageInfo]:
        return prompt(self.rng.randrange(6), self.rng.randint(1, 12), self.rng.choice(("", "salt")))

    def offer(self) -> None:
        infos = self.infos()
        start = self.rng.randrange(len(infos))
        used, prompt_tokens = self.any_use()
        self.note(infos[start:], prompt_tokens)
        self.r.offer(infos[start:], used=used, prompt_tokens=prompt_tokens)

    def begin(self) -> None:
        load = self.r.begin(self.infos())
        if load is not None:
            self.loads[load] = 0

    def advance(self) -> None:
        if not self.loads:
            return
        load = self.rng.choice(list(self.loads))
        if self.rng.random() < 0.5 and not self.r.lower.settled(load):
            return
        tiers, state = self.r.bring(load, self.loads[load])
        self.loads[load] += len(tiers)
        if state is PageState.ABSENT:
            self.r.lower.end(load)
            del self.loads[load]

    def end(self) -> None:
        if self.loads:
            load = self.rng.choice(list(self.loads))
            del self.loads[load]
            self.r.lower.end(load)

    def answer(self) -> None:
        ready = self.r.store.ready()
        if ready:
            operation = self.rng.choice(ready)
            ends = {"read": _READ_ENDS, "write": _WRITE_ENDS, "delete": (None, None, Reason.IO)}
            self.r.store.finish(operation, self.rng.choice(ends[operation.kind]))

    def tick(self) -> None:
        self.r.clock.now += self.rng.choice((0.01, 0.5, 2.0, 100.0))
        self.r.lower.expire_pins()

    def pin(self) -> None:
        infos = self.infos()[:4]
        until = self.rng.choice((self.r.clock.now + 1.0, math.inf))
        try:
            self.r.lower.pin(infos[: sum(self.r.lower.longest(infos).values())], until)
        except FailedPreconditionError:
            return

    def unpin(self) -> None:
        self.r.lower.unpin(self.infos())

    def drain(self) -> None:
        def done() -> None:
            self.drained += 1

        self.drains += 1
        self.r.lower.when_drained(done)

    def drop_host(self) -> None:
        self.r.lower.drop_host(stored_only=self.rng.random() < 0.5)

    def remove(self) -> None:
        for info in self.infos()[-2:]:
            self.r.disk.remove(info.key)

    def lose(self) -> None:
        """A step fails, and some copies with it."""
        lost = {info.key for info in self.infos()[-2:]}
        self.r.lower.drop_unusable(lambda payload: payload[:16].tobytes() not in lost)

    def leave_l1(self) -> None:
        """What write-back does with pages that L1 gives up, leaves first."""
        infos = self.infos()
        used, prompt_tokens = self.any_use()
        self.note(infos, prompt_tokens)
        self.r.leave([Offer(0, info, prompt_tokens, used) for info in reversed(infos)])

    def any_use(self) -> tuple[bool, int]:
        return self.rng.random() < 0.5, self.rng.choice((1, 1000))

    def note(self, infos: list[PageInfo], prompt_tokens: int) -> None:
        if prompt_tokens >= self.r.lower.policy.l3_min_tokens:
            self.wanted |= {page_of(OWNER, MODEL, info).name for info in infos}


SETTINGS: list[dict[str, Any]] = [
    {},
    {"keep": False},
    {"write": "write-back"},
    {"write": "write-back", "keep": False},
    {"write": "write-back", "l3_min_tokens": 100, "l3_admission": "second-use"},
    {"write": "write-through-selective", "l3_min_tokens": 100},
    {"l3_admission": "second-use", "load": "auto"},
]


@pytest.mark.parametrize("policy", SETTINGS, ids=str)
@settings(deadline=None, max_examples=200)
@given(
    seed=st.integers(0, 2**32),
    l2=st.integers(1, 12),
    l3=st.integers(0, 20),
    steps=st.integers(1, 250),
)
def test_any_order_of_things(policy: dict[str, Any], seed: int, l2: int, l3: int, steps: int) -> None:
    own, foreign = prompt(1, 5), prompt(2, 4)
    storm = Storm(
        rig(l2=l2, l3=l3, own=own[: l3 // 2], foreign=foreign, load_timeout_s=1.0, **policy),
        random.Random(seed),
    )
    for _ in range(steps):
        storm.step()
    storm.finish()
