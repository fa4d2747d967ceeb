"""Compiles programs of `tests.engine.plans.TPU_PLANS` for a TPU that need not be there, and prints what each
needs as a JSON line: `python -m tests.engine.compile_for_tpu PLAN PROGRAM ...`.

A process of its own, for libtpu reads its environment (`ENVIRONMENT`, and TPU_LIBRARY_PATH) when jax starts.
"""

from __future__ import annotations

import json
import re
import sys
from concurrent.futures import ThreadPoolExecutor

import jax
import numpy as np
from jax.experimental import topologies
from jax.sharding import Mesh, SingleDeviceSharding

from jkv.engine.programs import Program, programs
from jkv.kernels.mesh import TP
from tests.engine.plans import TPU_PLANS, over

# A slice of four chips, the smallest there is; programs are compiled for the first, or for all of them.
ENVIRONMENT = {
    "JAX_PLATFORMS": "cpu",
    "JAX_ENABLE_COMPILATION_CACHE": "false",
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_ACCELERATOR_TYPE": "v6e-4",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "true",  # there is no chip that two processes could fight over
}
_TOPOLOGY = "v6e:2x2"
COLLECTIVES = ("all-reduce", "all-gather", "all-to-all", "collective-permute", "reduce-scatter")


def main(plan: str, *names: str) -> None:
    chips = topologies.get_topology_desc(platform="tpu", topology_name=_TOPOLOGY).devices
    sharding = SingleDeviceSharding(chips[0])
    found = TPU_PLANS[plan]
    if found.mesh is not None:
        found = over(found, Mesh(np.asarray(chips), (TP,)))
    wanted = [p for p in programs(found) if p.name in names]
    with ThreadPoolExecutor(2) as pool:
        for line in pool.map(lambda p: json.dumps(needs(p, sharding)), wanted):
            print(line, flush=True)


def needs(program: Program, sharding: SingleDeviceSharding) -> dict[str, str | int]:
    def placed(x: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        return x if x.sharding else jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)

    compiled = program.lower(jax.tree.map(placed, program.args)).compile()
    memory, text = compiled.memory_analysis(), compiled.as_text()
    assert memory is not None
    assert text is not None
    return {
        "program": program.name,
        "alias": memory.alias_size_in_bytes,
        "temporaries": memory.temp_size_in_bytes,
        "outputs": memory.output_size_in_bytes,
        "host_outputs": memory.host_output_size_in_bytes,
        **{name: len(re.findall(rf" {name}(-start)?\(", text)) for name in COLLECTIVES},
    }


if __name__ == "__main__":
    main(*sys.argv[1:])
