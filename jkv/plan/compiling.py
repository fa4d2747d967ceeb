"""An engine's programs, compiled for devices that need not be there, and what each of them needs."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import topologies
from jax.sharding import SingleDeviceSharding

from jkv.engine.l1_size import ProgramBytes
from jkv.engine.programs import Program
from jkv.errors import JkvError
from jkv.models.params import Params
from jkv.plan.targets import Target

_THREADS = 2


@dataclass(frozen=True, kw_only=True)
class Compiled:
    """A program as the compiler made it; bytes are one device's. `outputs` are those that are not arguments
    updated in place (`aliased`), `host_outputs` those in the host's memory.
    """

    program: str
    seconds: float
    arguments: int
    aliased: int
    temporaries: int
    outputs: int
    host_outputs: int
    code: int

    @property
    def beside_arguments(self) -> ProgramBytes:
        return ProgramBytes(temporaries=self.temporaries, outputs=self.outputs, code=self.code)


def devices(target: Target) -> Sequence[Any]:
    """The target's devices, as a compiler sees them."""
    if target.platform == "cpu":
        return jax.devices("cpu")[: target.chips]
    platform = "cuda" if target.platform == "gpu" else target.platform
    return topologies.get_topology_desc(platform=platform, **target.options()).devices


def compile_all(
    programs: Iterable[Program], device: Any, done: Callable[[Compiled], None] = lambda compiled: None
) -> list[Compiled]:
    """Compiles programs, two at a time as an engine does, and calls `done` after each.

    Raises:
        JkvError: the compiler refuses one.
    """

    def one(program: Program) -> Compiled:
        compiled = compile_one(program, device)
        done(compiled)
        return compiled

    with ThreadPoolExecutor(_THREADS) as pool:
        return list(pool.map(one, programs))


def compile_one(program: Program, device: Any) -> Compiled:
    """Compiles a program for the devices its arguments name, `device` where they name none.

    Raises:
        JkvError: the compiler refuses it.
    """
    started = time.monotonic()
    compiled = build(program, device)
    return measured(program.name, compiled, time.monotonic() - started)


def build(program: Program, device: Any) -> jax.stages.Compiled:
    """As `compile_one`, but the executable itself, which can only be looked at."""
    try:
        return program.lower(placed(program.args, device)).compile()
    except jax.errors.JaxRuntimeError as error:
        raise JkvError(f"{program.name} does not compile for {device}: {error}") from error


def measured(name: str, compiled: jax.stages.Compiled, seconds: float) -> Compiled:
    """What the compiler says of a program that took `seconds` to compile."""
    memory = compiled.memory_analysis()
    assert memory is not None, "the compiler does not tell what programs need"
    return Compiled(
        program=name,
        seconds=seconds,
        arguments=memory.argument_size_in_bytes,
        aliased=memory.alias_size_in_bytes,
        temporaries=memory.temp_size_in_bytes,
        outputs=memory.output_size_in_bytes - memory.alias_size_in_bytes,
        host_outputs=memory.host_output_size_in_bytes,
        code=memory.generated_code_size_in_bytes,
    )


def unpadded_bytes(tree: Any) -> int:
    """Bytes of abstract arrays on one device, at least."""

    def size(x: jax.ShapeDtypeStruct) -> int:
        shape = x.shape if x.sharding is None else x.sharding.shard_shape(x.shape)
        return math.prod(shape) * x.dtype.itemsize

    return sum(map(size, jax.tree.leaves(tree)))


def weights_bytes(params: Params, device: Any) -> int:
    """Bytes that the weights take on one device, whose layout pads some of them."""
    holds = jax.jit(lambda params: jnp.int32(0), keep_unused=True)
    memory = holds.lower(placed(params, device)).compile().memory_analysis()
    assert memory is not None, "the compiler does not tell what programs need"
    return memory.argument_size_in_bytes


def placed(tree: Any, device: Any) -> Any:
    """Abstract arrays, those without a place on `device`."""

    def place(x: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        if x.sharding is not None:
            return x
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=SingleDeviceSharding(device))

    return jax.tree.map(place, tree)
