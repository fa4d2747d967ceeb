"""Pages on their way between L1 and L2, around the steps. Owner: the engine's thread."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from jkv.cache.l1 import Offer
from jkv.cache.load import Load, PageState
from jkv.cache.pages import PageInfo, Tier
from jkv.engine.runner import Runner
from jkv.engine.scheduler import Scheduler


@dataclass(eq=False)
class _Prefetch:
    """A prefix that an operator wants in L1 or L2; `number` is the next page to look at."""

    infos: Sequence[PageInfo]
    tier: Tier
    load: Load | None
    done: Callable[[], None]
    number: int = 0
    taken: list[int] = field(default_factory=list)  # pages of L1 filled in this turn


class Transfers:
    """Dispatches the copies that the scheduler and the lower tiers decide on."""

    def __init__(self, scheduler: Scheduler, runner: Runner) -> None:
        self._scheduler, self._runner = scheduler, runner
        self._prefetches: list[_Prefetch] = []

    @property
    def idle(self) -> bool:
        return not self._prefetches

    def before_step(self, *, alone: bool) -> bool:
        """Copies down what L1 has just given up, then up what the step will read; whether it copied anything.

        `alone` says that no step is under way: then a copy up can be timed.
        """
        self._scheduler.lower.expire_pins()
        restores = self._scheduler.take_restores()
        for prefetch in list(self._prefetches):
            self._advance(prefetch, restores)
        # After all that takes pages, before all that fills them.
        leaving = self._scheduler.lower.take_leaving()
        self._save(leaving)
        if restores:
            self._restore(restores, timed=alone)
        return bool(leaving or restores)

    def after_step(self) -> None:
        """Copies down the pages that the steps dispatched so far fill, as far as they are wanted below."""
        self._save(self._scheduler.lower.choose(self._scheduler.take_offers()))

    def prefetch(self, infos: Sequence[PageInfo], tier: Tier, done: Callable[[], None]) -> None:
        """Brings a prefix up, a batch before each step, and calls `done` when no more of it will come."""
        load = self._scheduler.lower.begin(infos, count_misses=False)
        self._prefetches.append(_Prefetch(infos, tier, load, done))

    def demote(self) -> int:
        """Copies down what only L1 holds and drops from it all that is below then; returns how many pages.

        Where that is the disk, it gets these pages whatever it should be worth by the flags.
        """
        pool, lower = self._scheduler.pool, self._scheduler.lower
        idle = pool.idle()
        if not lower.host.keep:
            idle = [replace(o, prompt_tokens=lower.policy.l3_min_tokens, used=True) for o in idle]
        missing = (o for o in reversed(idle) if not lower.has(o.info))
        # Copies of all of L1 at once could be more than the host has room for.
        self._save(list(itertools.islice(missing, lower.host.tree.capacity)))
        # The next to be evicted are leaves: from them up, no page goes before those that continue it.
        return sum(lower.has(o.info) and pool.forget(o.info.key) for o in idle)

    def write_down(self) -> bool:
        """Copies down the next pages that only L1 holds and L3 is to have, pinned ones too, and queues them
        for it; whether there were any. As many at a time as L2 has room for until they are written.
        """
        pool, lower = self._scheduler.pool, self._scheduler.lower
        room = max(1, lower.host.tree.capacity // 4)
        wanted = (o for o in pool.held() if lower.admits(o) and not lower.has(o.info))
        offers = list(itertools.islice(wanted, room))
        self._save(offers)
        for offer in offers:
            pool.forget(offer.info.key)
        lower.flush_dirty()
        return bool(offers)

    def failed(self) -> None:
        """The device's buffers are lost, and copies that waited for them; prefetches end."""
        self._scheduler.lower.drop_unusable(self._runner.usable)
        for prefetch in list(self._prefetches):
            self._end(prefetch)

    def _save(self, offers: Sequence[Offer]) -> None:
        for offer, copy in zip(offers, self._runner.save([o.page for o in offers]), strict=True):
            self._scheduler.lower.saved(offer, copy)

    def _restore(self, restores: dict[int, Any], *, timed: bool) -> None:
        started = time.monotonic()
        self._runner.restore(list(restores), list(restores.values()))
        if timed:
            self._runner.wait()
            gate = self._scheduler.lower.gate
            gate.record_load(Tier.L2, len(restores), time.monotonic() - started)

    def _advance(self, prefetch: _Prefetch, restores: dict[int, Any]) -> None:
        pool, lower = self._scheduler.pool, self._scheduler.lower
        more = True
        while more and prefetch.number < len(prefetch.infos) and len(restores) < pool.total:
            info = prefetch.infos[prefetch.number]
            if pool.find(info) is None and prefetch.load is not None:
                state = lower.state(prefetch.load, prefetch.number)
                if state is PageState.COMING:
                    break
                more = state is PageState.READY and self._take(prefetch, info, restores)
            else:
                more = pool.find(info) is not None
            prefetch.number += more
        else:
            self._end(prefetch)
        pool.release(prefetch.taken)
        prefetch.taken = []

    def _take(self, prefetch: _Prefetch, info: PageInfo, restores: dict[int, Any]) -> bool:
        pool, lower = self._scheduler.pool, self._scheduler.lower
        assert prefetch.load is not None
        if prefetch.tier is Tier.L2:
            lower.take(prefetch.load, prefetch.number)
            return True
        pages = pool.allocate(1)
        if pages is None:
            return False
        payload, _ = lower.take(prefetch.load, prefetch.number)
        prompt_tokens = len(prefetch.infos) * pool.page_size
        restores[pool.publish(pages[0], info, prompt_tokens)] = payload
        prefetch.taken += pages
        return True

    def _end(self, prefetch: _Prefetch) -> None:
        self._prefetches.remove(prefetch)
        if prefetch.load is not None:
            self._scheduler.lower.end(prefetch.load)
        self._use_again(prefetch)
        prefetch.done()

    def _use_again(self, prefetch: _Prefetch) -> None:
        """Gives the pages of a prefix their order of use: they came parents first, and go leaves first."""
        pool = self._scheduler.pool
        found = [page for info in prefetch.infos if (page := pool.find(info)) is not None]
        for page in found:
            pool.acquire(page)
        pool.release(found)
