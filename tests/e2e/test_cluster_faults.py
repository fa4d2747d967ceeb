"""What happens to etcd, to routers and to events, with real engines up: requests are answered meanwhile, and
afterwards the router's index is what the engines hold.
"""

from __future__ import annotations

import dataclasses
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

import pytest

from jkv.router import records
from jkv.router.records import RefusedRecord
from tests.e2e.calls import collect
from tests.e2e.cluster import LONG, PAGE, PROMPT, Cluster, RouterProcess, request
from tests.e2e.server import wait_for
from tests.router.engine_records import engine
from tests.router.meddler import meddling_with

GONE = ("127.0.0.1:1", "192.0.2.1:50051")  # nobody listens; no route, or no answer


@contextmanager
def _killed(cluster: Cluster) -> Iterator[None]:
    cluster.etcd.kill()
    yield
    cluster.etcd.start()


@contextmanager
def _emptied(cluster: Cluster) -> Iterator[None]:
    cluster.etcd.kill()
    cluster.etcd.empty()
    yield
    cluster.etcd.start()


@contextmanager
def _frozen(cluster: Cluster) -> Iterator[None]:
    cluster.etcd.stop()
    yield
    cluster.etcd.resume()


@contextmanager
def _frozen_then_emptied(cluster: Cluster) -> Iterator[None]:
    cluster.etcd.stop()
    yield
    with _emptied(cluster):
        pass


@contextmanager
def _slow(cluster: Cluster) -> Iterator[None]:
    cluster.relay.slow_down(5.0)
    yield
    cluster.relay.slow_down(0.0)


Fault = Callable[[Cluster], AbstractContextManager[None]]


@pytest.mark.parametrize(
    ("fault", "seconds"),
    [
        pytest.param(_killed, 0, id="killed"),
        pytest.param(_emptied, 0, id="emptied"),
        pytest.param(_frozen, 0, id="frozen"),
        pytest.param(_slow, 0, id="slow"),
        pytest.param(_killed, 14, marks=pytest.mark.full, id="killed for long"),
        pytest.param(_frozen, 14, marks=pytest.mark.full, id="frozen for longer than leases last"),
        pytest.param(_frozen_then_emptied, 10, marks=pytest.mark.full, id="frozen, then emptied"),
        pytest.param(_slow, 20, marks=pytest.mark.full, id="slow for long"),
    ],
)
def test_nobody_misses_etcd(cluster: Cluster, fault: Fault, seconds: float) -> None:
    """At least until the router has noticed, and `seconds` more."""
    name, logged = f"{fault.__name__} {seconds}", len(cluster.router.output)
    with fault(cluster):
        cluster.ask(f"{name} at once")
        wait_for(lambda: cluster.router.membership.startswith("frozen: "), "the router notices", 30)
        end, number = time.monotonic() + seconds, 0
        while number < 3 or time.monotonic() < end:
            cluster.ask(f"{name} {number}")
            number += 1
    wait_for(lambda: cluster.router.membership == "etcd", "the router follows etcd again", 30)
    wait_for(lambda: _registered(cluster) == set(cluster.servers), "engines have their records again", 30)
    for id in cluster.servers:
        wait_for(lambda id=id: cluster.router.engine(id).shards == 1, f"L3 of {id} is on record", 30)
        assert cluster.router.engine(id).state == "serving"
    cluster.ask(f"{name} again")
    cluster.wait_agreed()
    for change in (" joined", " left", " replaced"):
        assert change not in cluster.router.output[logged:]


def _registered(cluster: Cluster) -> set[str]:
    found = cluster.etcd.keys(records.engines_prefix("default"))
    return {key.rpartition("/")[2] for key in found}


def test_a_router_that_missed_more_than_etcd_remembers_reads_all_again(cluster: Cluster) -> None:
    """The news of a refusal is compacted away before the router hears of it."""
    cluster.relay.cut()
    wait_for(lambda: cluster.router.membership.startswith("frozen: "), "the router notices", 30)
    key = records.engine_key("default", "misfit")
    note = RefusedRecord(id="misfit", address="127.0.0.1:1", refused="it does not fit")
    cluster.etcd.put(key, records.encode(note))
    cluster.ask("unheard of")
    cluster.etcd.put("/elsewhere", b"later")
    cluster.etcd.compact()
    cluster.relay.mend()

    def refused() -> list[str]:
        return [one.id for one in cluster.router.status().refused]

    wait_for(lambda: refused() == ["misfit"], "the router has read all again", 30)
    cluster.etcd.delete(key)
    wait_for(lambda: not refused(), "the router follows changes again", 30)
    assert cluster.router.membership == "etcd"
    cluster.ask("heard of")


def test_a_process_restarted_in_place_takes_what_was_in_memory_with_it_and_nothing_else(
    cluster: Cluster,
) -> None:
    id, _ = cluster.ask("before")
    cluster.drain(id)
    cluster.wait_agreed()
    before = cluster.router.engine(id)
    assert min(before.pages[tier] for tier in ("l1", "l2", "l3")) >= len(PROMPT) // PAGE
    cluster.stop(id, signal.SIGKILL)
    cluster.servers[id].process.wait()
    cluster.restart(id)
    wait_for(lambda: cluster.router.engine(id).self_test == "passed", "the new process is known", 60)
    cluster.wait_agreed()
    after = cluster.router.engine(id)
    assert after.incarnation != before.incarnation
    assert after.pages["l3"] >= before.pages["l3"]
    assert after.pages["l1"] < before.pages["l1"], "pages that died with the process"
    again, usage = cluster.ask("before")
    assert (again, usage["cached_by_tier"]["l3"]) == (id, 48)


def test_two_routers_agree_and_one_that_was_killed_is_ready_in_seconds(cluster: Cluster) -> None:
    """Also where etcd has keys of engines that are gone for good."""
    for number, address in enumerate(GONE):
        record = dataclasses.replace(engine(f"gone{number}", address=address), model="tiny")
        cluster.etcd.put(records.engine_key("default", record.id), records.encode(record))
    second = cluster.another_router("second")
    _agree(cluster, second)
    call = second.generation.Generate(request(LONG, "left behind"), timeout=60)
    next(call)
    second.kill()
    for id in cluster.servers:
        wait_for(lambda id=id: not cluster.router.engine(id).load.running, f"{id} ends what nobody reads", 20)

    before = time.monotonic()
    second = cluster.another_router("second")
    listening = time.monotonic()
    second.find(r"^(ready): default on ", 20)
    ready = time.monotonic()
    assert ready - listening < 5, (
        f"listening after {listening - before:.1f} s, ready after {ready - before:.1f}"
    )
    _agree(cluster, second)
    assert second.engine("gone0").state == second.engine("gone1").state == "connecting"
    second.kill()
    for number in range(len(GONE)):
        cluster.etcd.delete(records.engine_key("default", f"gone{number}"))


def _agree(cluster: Cluster, second: RouterProcess) -> None:
    """On what engines hold, and on where a prompt should go."""
    cluster.ask("agreed")
    for id in cluster.servers:
        second.wait_state(id, "serving")
        wait_for(lambda id=id: second.engine(id).self_test == "passed", f"self-test of {id}", 30)
    for router in (cluster.router, second):
        cluster.wait_agreed(router)
    chosen = [router.explain("agreed").chosen for router in (cluster.router, second)]
    assert chosen[0] == chosen[1]


def test_events_that_are_lost_late_and_out_of_order_are_made_good(cluster: Cluster) -> None:
    targets = [server.address for server in cluster.servers.values()]
    with meddling_with(targets, seed=4) as meddlers:
        addresses = ",".join(meddler.address for meddler in meddlers)
        router = RouterProcess(
            cluster.directory / "meddled", "--engines", addresses, "--policy", "round-robin"
        )
        try:
            for id in cluster.servers:
                router.wait_state(id, "serving")
            for meddler in meddlers:
                meddler.meddling = True
            for number in range(24):
                collect(router.generation.Generate(request(2 * PAGE, f"meddled {number}"), timeout=30))
            done = meddlers[0].done + meddlers[1].done
            assert {"lost", "late", "swapped"} <= done.keys()
            for meddler in meddlers:
                meddler.meddling = False
            cluster.wait_agreed(router)
            assert router.output.count("asking for a snapshot") >= 2
        finally:
            router.kill()
