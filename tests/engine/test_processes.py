"""What process 0 of an engine tells the others. That they do it: tests/e2e/test_processes.py."""

from __future__ import annotations

import dataclasses
import socket
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest

from jkv.config import ServeConfig
from jkv.engine import processes
from jkv.engine.processes import STOP, Follower, Leader, host_inputs, shared_devices, unpack
from jkv.engine.programs import programs
from jkv.errors import ConfigError, EngineFailedError
from tests.engine.plans import SMOLLM2, plan_of

_PLAN = plan_of(
    dataclasses.replace(SMOLLM2, vocab_size=64, num_layers=1, windows=(None,)),
    dtype="float32",
    pages=4,
    max_num_seqs=2,
    max_batched_tokens=2,
)


@pytest.fixture
def ends() -> Iterator[tuple[Leader, Follower, socket.socket]]:
    with socket.create_server(("127.0.0.1", 0)) as server, socket.socket() as leader:
        leader.connect(server.getsockname())
        follower, _ = server.accept()
        with follower:
            yield Leader([leader]), Follower(follower), leader


def test_every_programs_inputs_arrive_as_they_were(ends: tuple[Leader, Follower, socket.socket]) -> None:
    leader, follower, _ = ends
    rng = np.random.default_rng(0)
    for program in programs(_PLAN):
        inputs = jax.tree.map(lambda x: rng.integers(0, 2, x.shape).astype(x.dtype), host_inputs(program))
        leader.tell(program.name, *inputs)
        name, data = follower.next()
        assert name == program.name
        arrived = unpack(data, host_inputs(program))
        assert jax.tree.structure(arrived) == jax.tree.structure(inputs)
        for got, sent in zip(jax.tree.leaves(arrived), jax.tree.leaves(inputs), strict=True):
            assert got.dtype == sent.dtype
            np.testing.assert_array_equal(got, sent)
    leader.tell(STOP)
    assert follower.next() == (STOP, b"")


def test_a_leader_that_is_gone_is_noticed(ends: tuple[Leader, Follower, socket.socket]) -> None:
    _, follower, connection = ends
    connection.sendall(b"\1")
    connection.close()
    with pytest.raises(EngineFailedError, match="process 0 has ended"):
        follower.next()


def test_each_process_gives_as_many_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    devices = [SimpleNamespace(id=i, process_index=i // 3) for i in range(5)]
    monkeypatch.setattr(processes.jax, "devices", lambda: devices)

    def chosen(tp: int) -> list[int]:
        config: Any = ServeConfig(tp=tp, num_processes=2, coordinator="h:1")
        return [device.id for device in shared_devices(config)]

    assert chosen(2) == [0, 3]
    assert chosen(4) == [0, 1, 3, 4]
    with pytest.raises(ConfigError, match=r"^--tp 6: process 1 needs 3 devices and has 2$"):
        chosen(6)
