from __future__ import annotations

import logging
import queue
from pathlib import Path

import pytest

from jkv.cache.l3.names import StoredPage
from jkv.cache.l3.watch import Watch
from tests.cache.l3.pages import WAIT_S, chain, identity, open_store, write


def test_pages_of_an_owner_that_came_later_are_found_and_their_end_too(tmp_path: Path) -> None:
    model = identity()
    found: queue.Queue[list[StoredPage]] = queue.Queue()
    reader = open_store(tmp_path, model)
    reader.watch(found.put)
    assert found.get(timeout=WAIT_S) == []
    writer = open_store(tmp_path, model)
    infos = chain(model, 3)
    write(writer, model, infos)
    pages = found.get(timeout=WAIT_S)
    while len(pages) < 3:
        pages = found.get(timeout=WAIT_S)
    assert {p.key for p in pages} == {i.key for i in infos}
    assert {p.owner for p in pages} == {writer.owner}
    for page in pages:
        writer.delete(page)
    writer.close()
    while pages:
        pages = found.get(timeout=WAIT_S)
    reader.close()


def test_a_listing_that_fails_in_an_unforeseen_way_is_not_the_last(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("jkv.cache.l3.watch._PAUSE_S", (0.001, 0.001))
    found: queue.Queue[list[StoredPage]] = queue.Queue()
    failures = iter([RuntimeError("not foreseen")])

    def look() -> list[StoredPage]:
        for error in failures:
            raise error
        return []

    with caplog.at_level(logging.CRITICAL):
        watch = Watch(look, found.put)
        assert found.get(timeout=WAIT_S) == []
    watch.close()
