"""An engine's /metrics, over a real socket."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from jkv.api.engine_metrics import EngineMetrics
from jkv.cache.l1 import L1Counts
from jkv.config import ServeConfig
from jkv.engine.stats import EngineStats
from jkv.errors import ConfigError, ShuttingDownError
from jkv.metrics import exporting
from tests.api.doubles import ScriptedCache
from tests.scrape import Samples, scrape

OPERATIONS = Path(__file__).parents[2] / "docs" / "operations.md"
COUNTED = EngineStats(
    steps=9,
    prompt_tokens=80,
    generated_tokens=7,
    preemptions=1,
    running=2,
    waiting=3,
    l1=L1Counts(total=10, free=5, in_use=1, cached=4),
)


@dataclass(frozen=True)
class _Engine:
    stats: EngineStats
    cache: ScriptedCache


@dataclass(frozen=True, kw_only=True)
class _Member:
    registered: bool
    recording: bool | None


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@asynccontextmanager
async def _exported(metrics: EngineMetrics) -> AsyncGenerator[Any, None]:
    """A function that scrapes."""
    port = _free_port()
    async with exporting(ServeConfig(metrics_port=port), metrics.read):

        async def ask() -> Samples:
            return await asyncio.to_thread(scrape, f"127.0.0.1:{port}")

        yield ask


def test_it_tells_what_engine_cache_and_membership_count() -> None:
    async def run() -> None:
        metrics = EngineMetrics()
        async with _exported(metrics) as ask:
            before = await ask()
            assert before.names == {"jkv_serving"}
            assert before["jkv_serving"] == 0
            assert before["process_resident_memory_bytes"] > 0
            metrics.open(_Engine(COUNTED, ScriptedCache()))
            metrics.member = _Member(registered=True, recording=False)
            found = await ask()
            metrics.close()
            assert (await ask())["jkv_serving"] == 0
        assert found["jkv_serving"] == 1
        assert (found["jkv_requests_running"], found["jkv_requests_waiting"]) == (2, 3)
        assert (found["jkv_prompt_tokens_total"], found["jkv_generated_tokens_total"]) == (80, 7)
        assert found.of("jkv_l1_pages") == {("in_use",): 1, ("cached",): 4, ("free",): 5}
        assert found.of("jkv_cached_tokens_total") == {("l1",): 88, ("l3",): 248, ("peer",): 0}
        assert found.of("jkv_cache_errors_total") == {("checksum", "l3"): 1, ("timeout", "l3"): 2}
        assert found.of("jkv_cache_breaker") == {
            (state, tier): state == ("half-open" if tier == "l3" else "closed")
            for tier in ("l1", "l3")
            for state in ("closed", "half-open", "open")
        }
        counted = ("pages", "capacity_pages", "bytes", "hits_total", "misses_total", "evictions_total")
        assert [found[f"jkv_cache_{name}", "l3"] for name in counted] == [30, 300, 30 * 2**20, 31, 32, 33]
        assert (found["jkv_cluster_registered"], found["jkv_cluster_recording"]) == (1, 0)
        page = OPERATIONS.read_text()
        assert [name for name in sorted(found.names) if f"`{name}`" not in page] == []

    asyncio.run(run())


def test_a_cache_that_does_not_answer_leaves_the_rest() -> None:
    async def run() -> None:
        cache = ScriptedCache()
        cache.failure = ShuttingDownError("the engine has stopped")
        metrics = EngineMetrics()
        metrics.open(_Engine(COUNTED, cache))
        async with _exported(metrics) as ask:
            found = await ask()
        assert found["jkv_generated_tokens_total"] == 7
        assert not any(name.startswith("jkv_cache") for name in found.names)

    asyncio.run(run())


def test_a_port_that_is_taken_is_named() -> None:
    async def run() -> None:
        with socket.socket() as taken:
            taken.bind(("127.0.0.1", 0))
            taken.listen()
            port = taken.getsockname()[1]
            with pytest.raises(ConfigError, match=f"--metrics-port {port}: cannot listen on 127.0.0.1: "):
                async with exporting(ServeConfig(metrics_port=port), EngineMetrics().read):
                    pass

    asyncio.run(run())
