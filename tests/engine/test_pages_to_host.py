"""The runner's copies of pages: out of the pool, through bytes, and back."""

from __future__ import annotations

import dataclasses
from concurrent.futures import ThreadPoolExecutor

import jax
import numpy as np
import pytest

from jkv.engine.host_pages import HostPage
from jkv.engine.programs import ProgramPlan, gather_name, programs, scatter_name
from jkv.engine.runner import Runner
from jkv.models.params import Params
from tests.engine.plans import SMOLLM2, plan_of

_TINY = dataclasses.replace(
    SMOLLM2, vocab_size=512, hidden_size=64, intermediate_size=96, num_layers=2, windows=(None, None)
)
_PAGES = 48


@pytest.fixture(
    scope="module", params=[("float32", 8), ("float32", 64), ("bfloat16", 16), ("int8", 64)], ids=str
)
def runner(request: pytest.FixtureRequest) -> Runner:
    kv_dtype, page_size = request.param
    return _runner(plan_of(_TINY, dtype="float32", kv_dtype=kv_dtype, pages=_PAGES, page_size=page_size))


@pytest.mark.parametrize("count", [0, 1, 3, 4, 5, 16, 27])
def test_any_number_of_pages_comes_back_in_order(runner: Runner, count: int) -> None:
    rng = np.random.default_rng(count)
    pages = _random_pages(runner, rng, count)
    numbers = rng.permutation(_PAGES)[:count].tolist()
    runner.restore(numbers, pages)
    saved = runner.save(numbers)
    assert [_bytes(runner, p) for p in saved] == [_bytes(runner, p) for p in pages]
    # Another order and other places.
    elsewhere = rng.permutation(_PAGES)[:count].tolist()
    runner.restore(elsewhere, saved[::-1])
    assert [_bytes(runner, p) for p in runner.save(elsewhere[::-1])] == [_bytes(runner, p) for p in pages]


def test_pages_not_named_stay(runner: Runner) -> None:
    rng = np.random.default_rng(0)
    runner.restore(range(_PAGES), _random_pages(runner, rng, _PAGES))
    before = [_bytes(runner, p) for p in runner.save(range(_PAGES))]
    new = _random_pages(runner, rng, 5)
    runner.restore([47, 0, 13, 14, 30], new)
    for number, page in zip([47, 0, 13, 14, 30], new, strict=True):
        before[number] = _bytes(runner, page)
    assert [_bytes(runner, p) for p in runner.save(range(_PAGES))] == before


def test_a_copy_keeps_what_the_page_held_when_it_was_asked_for(runner: Runner) -> None:
    rng = np.random.default_rng(1)
    numbers = list(range(_PAGES))
    contents = [_random_pages(runner, rng, _PAGES) for _ in range(4)]
    saved: list[list[HostPage]] = []
    for pages in contents:  # nothing waits here: copies and overwriting are in flight together
        runner.restore(numbers, pages)
        saved.append(runner.save(numbers))
    runner.reset()
    for pages, copies in zip(contents, saved, strict=True):
        assert [_bytes(runner, p) for p in copies] == [_bytes(runner, p) for p in pages]
        assert all(runner.ready(p) for p in copies)
    assert not any(any(_bytes(runner, p)) for p in runner.save([0, 47]))


def test_bytes_are_a_read_only_view_of_a_page_in_one_piece(runner: Runner) -> None:
    (page,) = runner.save([3])
    data = runner.page_to_bytes(page)
    assert (data.dtype, data.shape) == (np.uint8, (runner.page_bytes,))
    assert page.nbytes == runner.page_bytes
    if page.scales is None:
        assert not data.flags.writeable
        assert runner.page_to_bytes(page).ctypes.data == data.ctypes.data
    else:
        assert data.tobytes() == np.asarray(page.values).tobytes() + np.asarray(page.scales).tobytes()


def test_threads_turn_pages_to_bytes_and_back_beside_the_engines(runner: Runner) -> None:
    rng = np.random.default_rng(2)
    pages = _random_pages(runner, rng, _PAGES)
    numbers = list(range(_PAGES))
    runner.restore(numbers, pages)

    def there_and_back(page: HostPage) -> HostPage:
        return runner.page_from_bytes(runner.page_to_bytes(page).copy())

    with ThreadPoolExecutor(4) as pool:
        futures = [pool.submit(there_and_back, p) for p in runner.save(numbers)]
        for _ in range(5):
            runner.restore(numbers, pages)
        runner.reset()
        runner.restore(numbers, [f.result() for f in futures])
    assert [_bytes(runner, p) for p in runner.save(numbers)] == [_bytes(runner, p) for p in pages]


def test_bytes_of_another_size_are_no_page(runner: Runner) -> None:
    with pytest.raises(ValueError, match=f"one has {runner.page_bytes}"):
        runner.page_from_bytes(np.zeros(runner.page_bytes + 64, np.uint8))


def _random_pages(runner: Runner, rng: np.random.Generator, count: int) -> list[HostPage]:
    return [runner.page_from_bytes(rng.integers(0, 256, runner.page_bytes, np.uint8)) for _ in range(count)]


def _bytes(runner: Runner, page: HostPage) -> bytes:
    return runner.page_to_bytes(page).tobytes()


def _runner(plan: ProgramPlan) -> Runner:
    """One that can move pages and nothing else: no weights, no steps."""
    names = {name(count) for name in (gather_name, scatter_name) for count in plan.page_buckets}
    compiled = {p.name: p.lower().compile() for p in programs(plan) if p.name in names}
    nothing = jax.ShapeDtypeStruct((), np.float32)
    return Runner(plan, Params(embed=nothing, layers=None, norm=None, head=None), compiled, seed=0)
