"""Which pages one tier holds, in what order they were used, and which go first. No jax, no I/O, no clock.

Owner: the engine's thread. The least recently used page goes first among those that no present page
continues: leaves before their parents, so that what stays is always worth finding. Pages may come in any
order; one whose parent is missing waits for it under a placeholder, and so do the first pages of prompts,
whose parent is a request's root. Nothing here recurses or has a limit other than `capacity`.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable, Iterator
from typing import Generic, TypeVar, cast

V = TypeVar("V")

_SLACK = 64  # stale heap entries that are never worth a rebuild


class _Node(Generic[V]):
    """A page, or the placeholder of one that is absent and has children. Siblings are a linked list."""

    __slots__ = (
        "child",
        "holds",
        "key",
        "next",
        "parent",
        "present",
        "prev",
        "queued",
        "stamp",
        "value",
    )

    def __init__(self, key: bytes) -> None:
        self.key = key
        self.value: V | None = None
        self.parent: _Node[V] | None = None  # of a present page always a node
        self.child: _Node[V] | None = None
        self.next: _Node[V] | None = None
        self.prev: _Node[V] | None = None
        self.stamp = 0  # of its last use; no two pages have the same
        self.holds = 0  # users, and one for a pin
        self.present = False
        self.queued = False  # has its entry among the candidates


class PageTree(Generic[V]):
    """The pages of one tier by key: bounded, least recently used first, leaves before parents.

    A page that is held or pinned is never evicted, nor is a page above it. All operations take constant time
    or the logarithm of the page count, but where said otherwise.
    """

    def __init__(self, capacity: int) -> None:
        self.evictions = 0
        self._nodes: dict[bytes, _Node[V]] = {}
        self._absent: dict[bytes, _Node[V]] = {}
        self._pins: dict[bytes, float] = {}  # until when
        self._pins_due: list[tuple[float, bytes]] = []  # heap; an entry, never late, for each pin that ends
        # Heap of leaves that may be evicted, each once. An entry's stamp may be older than its page's: it is
        # put right when it comes up, so that a use costs no heap operation.
        self._candidates: list[tuple[int, _Node[V]]] = []
        self._stamp = 0
        self.capacity = capacity

    @property
    def capacity(self) -> int:
        """The most pages; may be 0. Lowering it evicts nothing: see `evict`."""
        return self._capacity

    @capacity.setter
    def capacity(self, pages: int) -> None:
        if pages < 0:
            raise ValueError(f"a capacity is a number of pages, got {pages}")
        self._capacity = pages

    @property
    def pinned(self) -> int:
        return len(self._pins)

    def __len__(self) -> int:
        return len(self._nodes)

    def __contains__(self, key: bytes) -> bool:
        return key in self._nodes

    def get(self, key: bytes) -> V | None:
        """The page's value; does not count as a use."""
        node = self._nodes.get(key)
        return None if node is None else node.value

    def touch(self, keys: Iterable[bytes]) -> None:
        """Marks a prefix, given from its start, as used: its present pages become the most recent ones.

        The deeper page counts as the older, as in eviction.
        """
        for key in reversed(list(keys)):
            if node := self._nodes.get(key):
                self._stamp += 1
                node.stamp = self._stamp

    def add(self, key: bytes, parent: bytes, value: V) -> list[tuple[bytes, V]] | None:
        """Adds an absent page as the most recent one; returns the pages evicted for it, in order.

        Returns None, and changes nothing, where the pages that may be evicted do not suffice. The pages above
        the new one are not evicted for it. Takes a step for each page above it where pages below it wait, and
        for each page in all where there are more than `capacity`.

        Raises:
            ValueError: the page would be above itself, so these keys are no hashes of their parents.
        """
        assert key not in self._nodes, "a page is added that is present"
        self._refuse_cycle(key, parent)
        need = len(self._nodes) + 1 - self._capacity
        if need > 1 and need > self._evictable_beside(parent):
            return None
        above = self._nodes.get(parent)
        evicted = self._evict(need, spare=above)
        if len(evicted) < need:
            if above is not None:
                self._offer(above)
            return None
        self._insert(key, parent, value)
        return evicted

    def evict(self, count: int) -> list[tuple[bytes, V]]:
        """Evicts the next `count` pages, or as many as may be; returns them in order."""
        return self._evict(count, spare=None)

    def remove(self, key: bytes) -> V:
        """Takes a present page out, pinned or not, with or without pages below it; it must not be held."""
        node = self._nodes[key]
        if key in self._pins:
            self.unpin(key)
        assert node.holds == 0, "a page in use is removed"
        return self._delete(node)

    def hold(self, key: bytes) -> None:
        """Adds a user to a present page."""
        self._nodes[key].holds += 1

    def release(self, key: bytes) -> None:
        """Takes a user away that `hold` added."""
        node = self._nodes[key]
        assert node.holds > (key in self._pins), "a page is released more often than held"
        self._release(node)

    def pin(self, key: bytes, until: float) -> None:
        """Keeps a present page until `until`, in the seconds that `expire` is given; math.inf for good.

        Of two pins of a page the one that ends later counts.
        """
        before = self._pins.get(key)
        if before is None:
            self.hold(key)
        elif before >= until:
            return
        self._pins[key] = until
        # An earlier entry of this pin will do: it is put right when it is due.
        if before is None and until != math.inf:
            if len(self._pins_due) > 2 * len(self._pins) + _SLACK:
                self._pins_due = [(due, k) for k, due in self._pins.items() if due != math.inf and k != key]
                heapq.heapify(self._pins_due)
            heapq.heappush(self._pins_due, (until, key))

    def unpin(self, key: bytes) -> bool:
        """Ends a pin; False where there is none."""
        if self._pins.pop(key, None) is None:
            return False
        self._release(self._nodes[key])
        return True

    def is_pinned(self, key: bytes) -> bool:
        return key in self._pins

    def expire(self, now: float) -> int:
        """Ends the pins that are due; returns how many."""
        count = 0
        while self._pins_due and self._pins_due[0][0] <= now:
            _, key = heapq.heappop(self._pins_due)
            until = self._pins.get(key, math.inf)
            if until <= now:
                count += self.unpin(key)
            elif until != math.inf:
                heapq.heappush(self._pins_due, (until, key))
        return count

    def keys_oldest_first(self) -> Iterator[bytes]:
        """All keys by their last use, to save it: adding them in this order restores it. Sorts them all."""
        return iter([node.key for node in sorted(self._nodes.values(), key=lambda n: n.stamp)])

    def check(self) -> None:
        """Raises AssertionError where the bookkeeping contradicts itself. Takes a step for each page."""
        queued = {id(n) for _, n in self._candidates if n.present}
        stamps = {n.stamp for n in self._nodes.values()}
        assert len(stamps) == len(self._nodes), "two pages have the same stamp"
        assert sum(n.present for _, n in self._candidates) == len(queued), "a page is twice a candidate"
        linked = 0
        for index, present in ((self._nodes, True), (self._absent, False)):
            for key, node in index.items():
                assert node.key == key, "a page is filed under another key"
                assert node.present == present, "a page is filed as what it is not"
                assert (node.parent is not None) == present, "a page has no parent, or an absent one has"
                children = _children(node)
                assert all(c.present and c.parent is node for c in children), "a child has another parent"
                assert present or (children and not node.holds), "a placeholder is of no use"
                assert not (present and not children and not node.holds) or node.queued, "a leaf is lost"
                assert node.queued == (id(node) in queued), "a candidate is lost"
                linked += len(children)
        assert linked == len(self._nodes), "a page is missing among its parent's children"
        assert all(self._nodes[k].holds for k in self._pins), "a pin does not hold"
        timed = {key for _, key in self._pins_due}
        assert all(until == math.inf or k in timed for k, until in self._pins.items()), "a pin never ends"

    def _refuse_cycle(self, key: bytes, parent: bytes) -> None:
        if key not in self._absent and key != parent:
            return  # nothing is below it yet
        above: bytes | None = parent
        while above is not None:
            if above == key:
                raise ValueError(f"page {key.hex()} would be above itself")
            node = self._nodes.get(above)
            above = node.parent.key if node and node.parent else None

    def _evictable_beside(self, parent: bytes) -> int:
        """How many pages could be evicted, one after the other, for a new one below `parent`."""
        kept: set[bytes] = set()
        for node in (self._nodes.get(parent), *(n for n in self._nodes.values() if n.holds)):
            while node is not None and node.present and node.key not in kept:
                kept.add(node.key)
                node = node.parent
        return len(self._nodes) - len(kept)

    def _insert(self, key: bytes, parent: bytes, value: V) -> None:
        node = self._absent.pop(key, None) or _Node(key)
        above = self._nodes.get(parent) or self._absent.get(parent)
        if above is None:
            above = self._absent[parent] = _Node(parent)
        self._stamp += 1
        node.value, node.parent, node.stamp, node.present = value, above, self._stamp, True
        node.prev, node.next = None, above.child
        if above.child is not None:
            above.child.prev = node
        above.child = node
        self._nodes[key] = node
        self._offer(node)

    def _delete(self, node: _Node[V]) -> V:
        """Unlinks a present page without users; a placeholder stays where it has children."""
        above, value = node.parent, cast(V, node.value)
        assert above is not None
        del self._nodes[node.key]
        node.present = False
        if node.prev is None:
            above.child = node.next
        else:
            node.prev.next = node.next
        if node.next is not None:
            node.next.prev = node.prev
        if node.child is not None:
            self._leave_placeholder(node)
        node.value = node.parent = node.prev = node.next = node.child = None
        if above.child is None:
            if above.present:
                self._offer(above)
            else:
                del self._absent[above.key]
        return value

    def _leave_placeholder(self, node: _Node[V]) -> None:
        # A new object, since the heap may still have an entry of the old one.
        stub = self._absent[node.key] = _Node(node.key)
        stub.child = node.child
        for child in _children(stub):
            child.parent = stub

    def _release(self, node: _Node[V]) -> None:
        node.holds -= 1
        self._offer(node)

    def _offer(self, node: _Node[V]) -> None:
        """Makes a page a candidate for eviction if it is one and is not yet."""
        if node.child is not None or node.holds or node.queued:
            return
        if len(self._candidates) > 2 * len(self._nodes) + _SLACK:  # removed pages
            self._candidates = [(n.stamp, n) for _, n in self._candidates if n.present]
            heapq.heapify(self._candidates)
        node.queued = True
        heapq.heappush(self._candidates, (node.stamp, node))

    def _evict(self, count: int, spare: _Node[V] | None) -> list[tuple[bytes, V]]:
        """Evicts up to `count` pages but `spare`, which is no candidate afterwards."""
        evicted: list[tuple[bytes, V]] = []
        while len(evicted) < count and self._candidates:
            stamp, node = self._candidates[0]
            if stamp != node.stamp and node.present:  # used since
                heapq.heapreplace(self._candidates, (node.stamp, node))
                continue
            heapq.heappop(self._candidates)
            node.queued = False
            if node.present and node is not spare and node.child is None and not node.holds:
                evicted.append((node.key, self._delete(node)))
        self.evictions += len(evicted)
        return evicted


def _children(node: _Node[V]) -> list[_Node[V]]:
    children: list[_Node[V]] = []
    child = node.child
    while child is not None:
        children.append(child)
        child = child.next
    return children
