"""An engine over several processes: who takes part, and what they must agree on.

Process 0 schedules, and tells the others each program that it runs with the inputs that come from its host;
they have the same programs, and run them on their parts of the buffers in the same order.
"""

from __future__ import annotations

import socket
import struct
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from jkv.config import ServeConfig
from jkv.engine.programs import ADMIT, Program
from jkv.errors import ConfigError, EngineFailedError

STOP, RESET = "stop", "reset"
_HEAD = struct.Struct("<II")  # bytes of the name, and of the inputs
# Which arguments of a kind of program come from the host.
_FROM_HOST = {"step": (3,), "sample": (3,), ADMIT: (1, 2, 3, 4), "gather": (1,), "scatter": (1,)}
_JOIN_S, _LEAVE_S = 300, 30


def join(config: ServeConfig) -> None:
    """Waits for the other processes, where there are any. Before jax is used for anything else."""
    if config.num_processes == 1:
        return
    jax.config.update("jax_enable_preemption_service", False)  # it would take SIGTERM for itself
    jax.distributed.initialize(
        config.coordinator,
        config.num_processes,
        config.process_id,
        initialization_timeout=_JOIN_S,
        shutdown_timeout_seconds=_LEAVE_S,
    )


def shared_devices(config: ServeConfig) -> Sequence[Any]:
    """The devices that may share a model, process by process, as many of each.

    Raises:
        ConfigError: a process has too few.
    """
    if config.num_processes == 1:
        return jax.local_devices()
    each = config.tp // config.num_processes
    chosen: list[Any] = []
    for process in range(config.num_processes):
        own = [d for d in jax.devices() if d.process_index == process]
        if len(own) < each:
            raise ConfigError(f"--tp {config.tp}: process {process} needs {each} devices and has {len(own)}")
        chosen += own[:each]
    return chosen


def least(number: int, config: ServeConfig) -> int:
    """The smallest of the processes' numbers, which all of them give at the same time."""
    if config.num_processes == 1:
        return number
    return int(multihost_utils.process_allgather(np.int64(number)).min())


def host_inputs(program: Program) -> tuple[Any, ...]:
    """The abstract inputs that the host gives a program."""
    return tuple(program.args[i] for i in _FROM_HOST[program.name.split("/")[0]])


class Leader:
    """Process 0's end: what it sends, every other process runs."""

    def __init__(self, followers: Sequence[socket.socket]) -> None:
        self._followers = followers
        for follower in followers:
            follower.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    @staticmethod
    def of(config: ServeConfig) -> Leader:
        """Awaits the others where the coordinator listens, on a port that jax's own service tells them. As
        that service, it belongs in a network that is trusted.
        """
        with socket.create_server((_host(config), 0)) as server:
            server.settimeout(_JOIN_S)
            multihost_utils.broadcast_one_to_all(np.int32(server.getsockname()[1]))
            return Leader([server.accept()[0] for _ in range(config.num_processes - 1)])

    def tell(self, name: str, *inputs: Any) -> None:
        """Has the others run a program, or STOP or RESET.

        Raises:
            OSError: one is gone.
        """
        data = b"".join(np.asarray(x).tobytes() for x in jax.tree.leaves(inputs))
        message = _HEAD.pack(len(name), len(data)) + name.encode() + data
        for follower in self._followers:
            follower.sendall(message)


class Follower:
    """Another process's end."""

    def __init__(self, leader: socket.socket) -> None:
        self._stream = leader.makefile("rb")

    @staticmethod
    def of(config: ServeConfig) -> Follower:
        """Connects to process 0."""
        port = int(multihost_utils.broadcast_one_to_all(np.int32(0)))
        leader = socket.create_connection((_host(config), port), timeout=_JOIN_S)
        leader.settimeout(None)  # there may be no request for hours
        return Follower(leader)

    def next(self) -> tuple[str, bytes]:
        """What process 0 runs next, and its inputs' bytes; waits for it.

        Raises:
            EngineFailedError: process 0 is gone.
        """
        name_bytes, data_bytes = _HEAD.unpack(self._read(_HEAD.size))
        return self._read(name_bytes).decode(), self._read(data_bytes)

    def _read(self, count: int) -> bytes:
        data = self._stream.read(count)
        if len(data) < count:
            raise EngineFailedError("process 0 has ended without saying so")
        return data


def _host(config: ServeConfig) -> str:
    assert config.coordinator is not None
    return config.coordinator.rpartition(":")[0]


def unpack(data: bytes, inputs: Any) -> Any:
    """Arrays like the abstract `inputs`, of the bytes that `Leader.tell` sent."""
    leaves, tree = jax.tree.flatten(inputs)
    arrays: list[np.ndarray] = []
    start = 0
    for leaf in leaves:
        arrays.append(np.frombuffer(data, leaf.dtype, leaf.size, start).reshape(leaf.shape))
        start += arrays[-1].nbytes
    assert start == len(data)
    return jax.tree.unflatten(tree, arrays)
