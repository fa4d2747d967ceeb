"""kill -9 in mid-write, again and again on one directory."""

from __future__ import annotations

import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.cache.l3.pages import assert_serves, chain, identity, open_store

# 3 MiB a page: as large as those of real models, so that kills hit writes under way.
MODEL = identity(heads=1024)

WRITER = r"""
import sys
from tests.cache.l3.pages import chain, content, identity, open_store
model = identity(heads=1024)
store = open_store(sys.argv[1], model)
infos = chain(model, 12)
pages = [content(model, info) for info in infos]
def tell(outcome):
    sys.stdout.write(f"{outcome.page.key.hex()} {outcome.reason}\n")  # in one piece
    sys.stdout.flush()
print(store.owner, len(store.list().own), flush=True)
for _ in range(1000):
    for info, page in zip(infos, pages):
        store.write(info, lambda page=page: page, tell)
        store.delete(store.page(info))
    for info, page in zip(infos, pages):
        store.write(info, lambda page=page: page, tell)
store.close()
"""


def kill_while_writing(directory: Path, after_s: float) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", WRITER, str(directory)], stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()
        first = process.stdout.readline()
        time.sleep(after_s)
        process.send_signal(signal.SIGKILL)
        lines = [first, *process.stdout.readlines()]
    assert process.returncode == -signal.SIGKILL
    assert all(line.split()[1] == "None" for line in lines if line.endswith("\n"))


@pytest.mark.parametrize("kills", [3, pytest.param(20, marks=pytest.mark.full)])
def test_every_page_that_is_listed_is_whole(tmp_path: Path, kills: int) -> None:
    chance = random.Random(kills)
    infos = {info.key: info for info in chain(MODEL, 12)}
    owners, listed = set(), 0
    for _ in range(kills):
        kill_while_writing(tmp_path, chance.uniform(0.05, 0.4))
        store = open_store(tmp_path, MODEL)
        owners.add(store.owner)
        assert not list(tmp_path.rglob("*__lock"))
        own = store.list().own
        listed += len(own)
        assert_serves(store, MODEL, [infos[page.key] for page in own])
        store.close()
    assert len(owners) == 1
    assert listed
