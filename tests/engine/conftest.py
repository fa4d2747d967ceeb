from __future__ import annotations

import gc
from collections import OrderedDict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.engine.harness import Bench, build, odd_checkpoint, tiny_checkpoint

Tiny = Callable[..., Bench]
# The same for all tests: another pool size would compile every program again.
L1_TOKENS = 4096
ALL_TIERS: dict[str, Any] = {"l2_gib": 0.1, "l3_gib": 0.1, "load_policy": "always"}
# Linux gives a process 65,530 memory mappings; XLA:CPU takes some 2,000 for an engine's programs, and crashes
# where there is none left.
_MOST_MAPPINGS = 35_000
_FEWEST_ENGINES = 6
_MAPS = Path("/proc/self/maps")


def _crowded() -> bool:
    return _MAPS.exists() and _MAPS.read_bytes().count(b"\n") > _MOST_MAPPINGS


@pytest.fixture(scope="session")
def shared_engines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tiny]:
    built: OrderedDict[tuple[Any, ...], Bench] = OrderedDict()  # the least recently used first

    def get(
        name: str = "llama3",
        page_size: int = 16,
        dialect: str = "config.json",
        *,
        tiers: bool = False,
        **flags: Any,
    ) -> Bench:
        odd = name == "odd"
        checkpoint = odd_checkpoint(tmp_path_factory.mktemp(name)) if odd else tiny_checkpoint(name, dialect)
        key = (name, checkpoint.config, page_size, tiers, *sorted(flags.items()))
        if key not in built:
            while len(built) > _FEWEST_ENGINES and _crowded():
                built.popitem(last=False)[1].stop()
                gc.collect()
            if tiers:
                flags = {**ALL_TIERS, "l3_dir": str(tmp_path_factory.mktemp("l3")), **flags}
            built[key] = build(checkpoint, page_size=page_size, l1_tokens=L1_TOKENS, **flags)
        built.move_to_end(key)
        return built[key]

    yield get
    for bench in built.values():
        bench.stop()


@pytest.fixture
def tiny(shared_engines: Tiny) -> Iterator[Tiny]:
    """Gives an engine over a tiny checkpoint with an empty cache, and checks that the test leaves no page in
    use; with `tiers` one that has L2 and L3 below L1.
    """
    used: list[Bench] = []

    def get(*args: Any, **kwargs: Any) -> Bench:
        used.append(shared_engines(*args, **kwargs))
        return used[-1]

    yield get
    for bench in used:
        bench.settle()
