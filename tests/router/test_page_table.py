from __future__ import annotations

import subprocess
import sys
from hashlib import blake2b

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jkv.errors import JkvError
from jkv.router.page_table import PageTable


def _keys(numbers: list[int]) -> np.ndarray:
    digests = [blake2b(number.to_bytes(4, "little"), digest_size=8).digest() for number in numbers]
    return np.frombuffer(b"".join(digests), np.uint64)


@given(
    st.lists(st.tuples(st.booleans(), st.sets(st.integers(0, 5000), max_size=400)), min_size=1, max_size=30)
)
def test_it_holds_what_a_dict_holds(batches: list[tuple[bool, set[int]]]) -> None:
    table, model = PageTable(reserve=4096), {}
    for adds, numbers in batches:
        if adds:
            fresh = sorted(numbers - model.keys())
            model |= {number: number + 1 for number in fresh}
            table.insert(_keys(fresh), np.array(fresh, np.uint32) + 1)
        else:
            gone = sorted(numbers & model.keys())
            table.remove(table.find(_keys(gone)))
            for number in gone:
                del model[number]
        table.check()
        assert table.used == len(model)
    every = list(range(0, 5000, 7))
    slots = table.find(_keys(every))
    values = np.where(slots < 0, 0, table.values[slots])
    assert values.tolist() == [model.get(number, 0) for number in every]


def test_it_grows_with_the_keys_and_no_further() -> None:
    table = PageTable(reserve=2**14)
    random = np.random.default_rng(0)
    for _ in range(100):
        keys = random.integers(1, 2**64, 700, dtype=np.uint64)
        table.insert(keys, np.ones(len(keys), np.uint32))
    table.check()
    grown = table.nbytes
    assert grown < 20 * table.used
    for _ in range(100):
        slots = np.flatnonzero(table.keys)
        table.remove(random.choice(slots, 700, replace=False))
        keys = random.integers(1, 2**64, 700, dtype=np.uint64)
        table.insert(keys, np.ones(len(keys), np.uint32))
    table.check()
    assert table.nbytes == grown


def test_keys_that_want_the_same_buckets_are_found_too() -> None:
    table = PageTable(reserve=2**16)
    # Both halves of each name bucket 1 of 256: they only come apart as the table grows.
    keys = np.array([(i << 42) | (1 << 32) | (i << 10) | 1 for i in range(1, 60)], np.uint64)
    table.insert(keys, np.arange(1, 60, dtype=np.uint32))
    table.check()
    assert table.values[table.find(keys)].tolist() == list(range(1, 60))


def test_a_full_table_refuses_and_keeps_what_it_has() -> None:
    table = PageTable(reserve=512)
    random = np.random.default_rng(0)
    kept = random.integers(1, 2**64, 2000, dtype=np.uint64)
    table.insert(kept, np.ones(2000, np.uint32))
    with pytest.raises(JkvError, match="full: 2000 pages"):
        table.insert(random.integers(1, 2**64, 3000, dtype=np.uint64), np.ones(3000, np.uint32))
    table.check()
    assert table.used == 2000
    assert (table.find(kept) >= 0).all()


def test_it_takes_what_addresses_there_are() -> None:
    code = """
import resource
import numpy as np
from jkv.router.page_table import PageTable
resource.setrlimit(resource.RLIMIT_AS, (2**30, 2**30))
table = PageTable(2**32)
keys = np.random.default_rng(0).integers(1, 2**64, 10_000, dtype=np.uint64)
table.insert(keys, np.ones(10_000, np.uint32))
table.check()
"""
    environment = {"OPENBLAS_NUM_THREADS": "1"}  # its threads need addresses too
    subprocess.run([sys.executable, "-c", code], env=environment, check=True)
