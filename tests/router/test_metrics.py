"""A router's /metrics, over a real socket, in front of doubles."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc

from jkv.metrics import exporting
from jkv.server_config import ServerConfig
from tests.router.doubles import Double
from tests.router.rig import PROMPT, Rig, cluster, prompt, rig_for, until
from tests.scrape import Samples, scrape

CLUSTER_PAGE = Path(__file__).parents[2] / "docs" / "cluster.md"


@asynccontextmanager
async def _exported(rig: Rig) -> AsyncGenerator[Any, None]:
    """A function that scrapes."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    async with exporting(ServerConfig(metrics_port=port), rig.router.metrics.read):

        async def ask() -> Samples:
            return await asyncio.to_thread(scrape, f"127.0.0.1:{port}")

        yield ask


def test_it_tells_what_the_router_knows_and_did() -> None:
    async def run() -> None:
        async with cluster("one", "two") as (rig, (one, two)), _exported(rig) as ask:
            one.publish(one.change("l1", one.keys(PROMPT)))
            await until(lambda: rig.router._fleet.engines[0].number == one.number)
            for _ in range(3):
                assert (await rig.generate(prompt())).engines() == ["one"]
            found = await ask()
            assert (found["jkv_serving"], found["jkv_router_members"]) == (1, 2)
            assert (found["jkv_router_membership_frozen"], found["jkv_router_refused_members"]) == (0, 0)
            assert found.of("jkv_router_decisions_total") == {("one",): 3, ("two",): 0}
            assert found["jkv_router_engine_pages", "one", "l1"] == len(one.pages["l1"])
            assert found["jkv_router_index_pages"] == len(one.pages["l1"] | two.pages["l1"])
            assert found["jkv_router_index_bytes"] > 0
            assert 0 <= found["jkv_router_index_lag_seconds", "two"] < 3
            for id in ("one", "two"):
                assert found["jkv_router_self_test_passed", id] == 1
                assert found["jkv_router_self_test_predicted_tokens", id] == 16
                assert found["jkv_router_self_test_cached_tokens", id] == 16
                assert found["jkv_router_engine_state", id, "serving"] == 1
                assert found["jkv_router_breaker", id, "closed"] == 1
            page = CLUSTER_PAGE.read_text()
            names = found.names | {"jkv_router_failures_total"}
            assert [name for name in sorted(names) if f"`{name}`" not in page] == []

    asyncio.run(run())


def test_failures_and_what_became_of_them_are_counted() -> None:
    async def run() -> None:
        async with cluster("one", "two", policy="round-robin") as (rig, (one, two)), _exported(rig) as ask:
            two.full = True
            for _ in range(4):
                assert (await rig.generate(prompt())).engines() == ["one"]
            two.full = False
            found = await ask()
            assert found["jkv_router_failures_total", "two", "full"] >= 1
            assert found["jkv_router_retries_total", "before_first_token"] >= 1
            assert found["jkv_router_retries_total", "mid_stream"] == 0
            await until(lambda: rig.router._fleet.engines[1].full_until < time.monotonic())
            one.hold_after = two.hold_after = 4
            call = asyncio.create_task(rig.generate(prompt(ignore_eos=True)))
            await until(lambda: one.held.is_set() or two.held.is_set())
            busy, other = (one, two) if one.held.is_set() else (two, one)
            other.hold_after = None
            await busy.kill()
            assert (await call).code is grpc.StatusCode.OK
            found = await ask()
            assert found["jkv_router_failures_total", busy.description.id, "lost"] == 1
            assert found["jkv_router_retries_total", "mid_stream"] == 1

    asyncio.run(run())


def test_a_self_test_that_failed_shows_what_differs() -> None:
    async def run() -> None:
        liar = Double("liar")
        liar._match = lambda request: type(Double._match(liar, request))(l1=8)  # type: ignore[method-assign]
        await liar.start()
        async with rig_for([liar]) as rig, _exported(rig) as ask:
            found = await ask()
            assert found["jkv_router_self_test_passed", "liar"] == 0
            assert found["jkv_router_self_test_predicted_tokens", "liar"] == 16
            assert found["jkv_router_self_test_cached_tokens", "liar"] == 8
        await liar.kill()

    asyncio.run(run())
