"""How arrays lie over the devices that share a model: the mesh's axis, and each array's partition.

Weights and KV cache are split by head: the pool's last axis holds heads one after the other, so that a
device's piece of it is whole heads.
"""

from __future__ import annotations

from typing import Any

import jax
from jax.sharding import AbstractMesh, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jkv.kernels.kv_pool import KvArrays

# Devices, or only how many there are, to lower for.
DeviceMesh = Mesh | AbstractMesh
TP = "tp"
WHOLE = P()
# Queries, keys, values and attention's output, `[T, heads, head_dim]`.
BY_HEAD = P(None, TP, None)
# A page on its own, see jkv.kernels.kv_pool.PoolShape.split_page_shape.
PAGE = P(TP)


def tp_of(mesh: DeviceMesh | None) -> int:
    """Devices that share the model; no mesh is one device."""
    return 1 if mesh is None else mesh.shape[TP]


def own_devices(mesh: DeviceMesh) -> list[Any]:
    """Those that belong to this process."""
    assert isinstance(mesh, Mesh)
    return [device for device in mesh.devices.flat if device.process_index == jax.process_index()]


def pool_partition(pool: KvArrays[Any]) -> KvArrays[Any]:
    """The partitions of a pool's arrays: heads lie along the last axis."""
    return jax.tree.map(lambda x: P(*[None] * (x.ndim - 1), TP), pool)


def whole(x: jax.Array, mesh: DeviceMesh | None) -> jax.Array:
    """Has every device hold all of `x`, in a program: partial sums become sums, pieces are gathered."""
    return x if mesh is None else jax.lax.with_sharding_constraint(x, NamedSharding(mesh, WHOLE))


def split(x: jax.Array, mesh: DeviceMesh | None) -> jax.Array:
    """Has every device compute its part of `x`'s last axis, in a program; all of it where that does not
    divide.
    """
    if mesh is None or x.shape[-1] % tp_of(mesh):
        return x
    partition = P(*[None] * (x.ndim - 1), TP)
    return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, partition))


def placed(tree: Any, mesh: DeviceMesh | None, partition: Any = WHOLE) -> Any:
    """Abstract arrays with their shardings; `partition` is one for all, or a tree of them."""
    if mesh is None:
        return tree
    partitions = jax.tree.map(lambda _: partition, tree) if isinstance(partition, P) else partition

    def place(x: jax.ShapeDtypeStruct, one: P) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, one))

    return jax.tree.map(place, tree, partitions)


def shardings(tree: Any) -> Any:
    """The shardings of abstract arrays."""
    return jax.tree.map(lambda x: x.sharding, tree)
