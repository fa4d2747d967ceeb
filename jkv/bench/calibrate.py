"""How fast this machine is, so that results of different machines can be compared.

Runs in a process of its own (`python -m jkv.bench.calibrate`): the load generator stays without jax and its
thread pools.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass

import numpy as np

from jkv.errors import JkvError

# jax on the CPU of the 2-core machine that jkv's own figures were measured on.
REFERENCE_MATMUL_GFLOPS = 130.0

_MATMUL = (512, 576, 1536)
# Long enough to meet a quiet moment of a shared machine.
_SECONDS = 1.0
_READ_THREADS = 2
# Twice 256 MiB: several times the last-level cache of any current CPU.
_READ_BYTES = 256 * 2**20
_TIMEOUT_S = 120.0


@dataclass(frozen=True, kw_only=True)
class Calibration:
    """Best of several runs: a float32 matmul by jax on the CPU, and two threads that read memory."""

    matmul_gflops: float
    matmul_vs_reference: float
    memory_read_gb_per_s: float


def calibrate() -> Calibration:
    """Measure in a child process; takes a few seconds.

    Raises:
        JkvError: the child failed.
    """
    command = [sys.executable, "-m", "jkv.bench.calibrate"]
    environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
    try:
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=_TIMEOUT_S, check=True
        )
    except subprocess.CalledProcessError as error:
        raise JkvError(f"calibration failed:\n{error.stderr}") from error
    except subprocess.TimeoutExpired as error:
        raise JkvError(f"calibration took more than {_TIMEOUT_S:g} s") from error
    return Calibration(**json.loads(done.stdout))


def _measure() -> Calibration:
    gflops = _matmul_gflops()
    return Calibration(
        matmul_gflops=gflops,
        matmul_vs_reference=gflops / REFERENCE_MATMUL_GFLOPS,
        memory_read_gb_per_s=_read_gb_per_s(),
    )


def _matmul_gflops() -> float:
    import jax
    import jax.numpy as jnp

    rows, inner, columns = _MATMUL
    left = jax.random.normal(jax.random.key(0), (rows, inner), jnp.float32)
    right = jax.random.normal(jax.random.key(1), (inner, columns), jnp.float32)
    multiply = jax.jit(jnp.matmul)
    multiply(left, right).block_until_ready()
    return 2 * rows * inner * columns / _best(lambda: multiply(left, right).block_until_ready()) / 1e9


def _read_gb_per_s() -> float:
    buffers = [np.ones(_READ_BYTES // 8, np.int64) for _ in range(_READ_THREADS)]
    with ThreadPoolExecutor(_READ_THREADS) as pool:
        return _READ_THREADS * _READ_BYTES / _best(lambda: list(pool.map(np.sum, buffers))) / 1e9


def _best(work: Callable[[], object]) -> float:
    """Seconds of the fastest call among `_SECONDS` of calls."""
    best = float("inf")
    begun = time.perf_counter()
    while (start := time.perf_counter()) < begun + _SECONDS:
        work()
        best = min(best, time.perf_counter() - start)
    return best


if __name__ == "__main__":
    print(json.dumps(asdict(_measure())))
