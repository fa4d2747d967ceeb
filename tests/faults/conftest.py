from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from tests.faults.rig import Tiered, prompts, tiered


@pytest.fixture(scope="session")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tiered]:
    """A server for tests that leave it as they found it: without faults, and able to do all it should."""
    with tiered(tmp_path_factory.mktemp("shared")) as subject:
        yield subject


@pytest.fixture
def subject(shared: Tiered) -> Iterator[Tiered]:
    """The shared server. Whatever a test did to it, it ends with nothing in use and all tiers in service."""
    yield shared
    shared.faults.clear()
    shared.is_idle_and_empty()


@pytest.fixture(scope="session")
def _sources() -> Iterator[int]:
    return iter(range(1000))


@pytest.fixture
def new_prompt(_sources: Iterator[int]) -> Callable[[int], list[int]]:
    """Makes a prompt of so many pages that no other test has."""
    return prompts(next(_sources))
