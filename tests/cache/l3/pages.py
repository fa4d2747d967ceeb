"""Pages with contents that tell them apart, and calls that wait for a store's outcomes."""

from __future__ import annotations

import queue
from collections.abc import Sequence
from hashlib import blake2b
from pathlib import Path

import numpy as np

from jkv.cache.keys import KEY_BYTES, pack_tokens, page_keys, request_root
from jkv.cache.l3.format import StoreIdentity
from jkv.cache.l3.names import StoredPage
from jkv.cache.l3.store import PageStore, ReadOutcome, StoreOptions, WriteOutcome
from jkv.cache.pages import PageInfo

PAGE_SIZE = 8
WAIT_S = 30.0


def identity(
    name: str = "model", *, kv_dtype: str = "float32", page_size: int = PAGE_SIZE, heads: int = 2
) -> StoreIdentity:
    """As in life, all that tells deployments apart goes into the model root."""
    shape = (3, page_size, 2 * heads, 16)
    root = blake2b(f"{name} {kv_dtype} {page_size}".encode(), digest_size=KEY_BYTES).digest()
    return StoreIdentity(
        model_root=root,
        kv_dtype=kv_dtype,
        page_shape=shape,
        page_bytes=int(np.prod(shape)) * 4,
        page_size=page_size,
    )


def chain(model: StoreIdentity, count: int, *, start: int = 0, salt: str = "") -> list[PageInfo]:
    """The pages of a prompt of `count` full pages."""
    root = request_root(model.model_root, cache_salt=salt)
    tokens = range(start, start + count * model.page_size)
    keys = page_keys(root, tokens, model.page_size)
    step = model.page_size
    return [
        PageInfo(key, parent, root, pack_tokens(tokens[number * step : (number + 1) * step]))
        for number, (key, parent) in enumerate(zip(keys, [root, *keys], strict=False))
    ]


def content(model: StoreIdentity, info: PageInfo) -> np.ndarray:
    """The page that belongs to this key, as flat uint8."""
    seed = int.from_bytes(info.key, "little")
    return np.random.default_rng(seed).integers(0, 256, model.page_bytes, np.uint8)


def open_store(location: Path | str, model: StoreIdentity, owner: str | None = None) -> PageStore:
    return PageStore.open(StoreOptions(location=str(location), owner=owner), model)


def write(store: PageStore, model: StoreIdentity, infos: Sequence[PageInfo]) -> list[WriteOutcome]:
    """Writes pages and waits; outcomes in the order of `infos`."""
    outcomes: queue.SimpleQueue[WriteOutcome] = queue.SimpleQueue()
    for info in infos:
        store.write(info, lambda info=info: content(model, info), outcomes.put)
    by_key = {outcome.page.key: outcome for outcome in (outcomes.get(timeout=WAIT_S) for _ in infos)}
    return [by_key[info.key] for info in infos]


def read(store: PageStore, page: StoredPage, info: PageInfo) -> ReadOutcome:
    outcomes: queue.SimpleQueue[ReadOutcome] = queue.SimpleQueue()
    store.read(page, info, outcomes.put)
    return outcomes.get(timeout=WAIT_S)


def delete(store: PageStore, page: StoredPage) -> bool:
    outcomes: queue.SimpleQueue[bool] = queue.SimpleQueue()
    store.delete(page, outcomes.put)
    return outcomes.get(timeout=WAIT_S)


def quarantine(store: PageStore, page: StoredPage) -> bool:
    outcomes: queue.SimpleQueue[bool] = queue.SimpleQueue()
    store.quarantine(page, outcomes.put)
    return outcomes.get(timeout=WAIT_S)


def assert_serves(store: PageStore, model: StoreIdentity, infos: Sequence[PageInfo]) -> None:
    """Every page is read, with its own content."""
    for info in infos:
        outcome = read(store, store.page(info), info)
        assert outcome.reason is None
        assert outcome.data is not None
        assert np.array_equal(outcome.data, content(model, info))


def reasons(outcomes: Sequence[WriteOutcome]) -> list[str | None]:
    return [outcome.reason for outcome in outcomes]
