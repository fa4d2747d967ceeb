"""Moving whole pages between a pool split over devices and arrays split likewise (see jkv.kernels.mesh).

Every device moves the heads it has. Where several hold copies of a head, each moves an equal part of its
layers, so that host memory holds a head once, and on the way back they exchange their parts.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from jkv.kernels.kv_pool import KvArrays, PoolShape
from jkv.kernels.mesh import PAGE, TP, WHOLE, DeviceMesh, pool_partition
from jkv.kernels.page_transfer import gather_pages, scatter_pages


def gather_split_pages(
    pool: KvArrays[jax.Array], numbers: jax.Array, *, shape: PoolShape, mesh: DeviceMesh
) -> tuple[KvArrays[jax.Array], ...]:
    """As `gather_pages`; the copies have `shape.split_page_shape`."""

    def local(pool: KvArrays[jax.Array], numbers: jax.Array) -> tuple[KvArrays[jax.Array], ...]:
        pages = gather_pages(pool, numbers, pages=shape.pages, kv_heads=shape.device_heads)
        return jax.tree.map(lambda x: _own_layers(x, shape), pages)

    specs = (pool_partition(pool), WHOLE)
    return jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=PAGE, check_vma=False)(pool, numbers)


def scatter_split_pages(
    pool: KvArrays[jax.Array],
    numbers: jax.Array,
    *copies: KvArrays[jax.Array],
    shape: PoolShape,
    mesh: DeviceMesh,
    sent: bool = False,
) -> KvArrays[jax.Array]:
    """As `scatter_pages`, for copies that `gather_split_pages` made; with `sent`, of which the first device
    has all and the others get their parts from it (see `sent_pages`).
    """

    def local(
        pool: KvArrays[jax.Array], numbers: jax.Array, copies: tuple[KvArrays[jax.Array], ...]
    ) -> KvArrays[jax.Array]:
        parts = jax.tree.map(_from_first, copies) if sent else copies
        pages = jax.tree.map(lambda x: _all_layers(x, shape), parts)
        return scatter_pages(pool, numbers, *pages, pages=shape.pages, kv_heads=shape.device_heads)

    specs = pool_partition(pool)
    return jax.shard_map(local, mesh=mesh, in_specs=(specs, WHOLE, PAGE), out_specs=specs, check_vma=False)(
        pool, numbers, copies
    )


def sent_pages(shape: PoolShape) -> KvArrays[jax.ShapeDtypeStruct]:
    """A page and room for as many as there are other devices, which send nothing: the first axis is the
    devices' again.
    """

    def for_each(x: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((shape.tp * x.shape[0], *x.shape[1:]), x.dtype)

    return jax.tree.map(for_each, shape.abstract_page())


def _from_first(page: jax.Array) -> jax.Array:
    """Each device's part of the first one's page. Exchanged and not summed: sums would change bits."""
    parts = lax.all_to_all(page, TP, 0, 0, tiled=True)
    return parts[: page.shape[0] // lax.axis_size(TP)]


def _own_layers(page: jax.Array, shape: PoolShape) -> jax.Array:
    """This device's part of the layers of a head that others have too; padded where they do not divide."""
    if shape.copies == 1:
        return page
    part = shape.split_page_shape[1]
    padding = [(0, 0), (0, part * shape.copies - shape.layers), *[(0, 0)] * (page.ndim - 2)]
    start = lax.axis_index(TP) % shape.copies * part
    return lax.dynamic_slice_in_dim(jnp.pad(page, padding), start, part, axis=1)


def _all_layers(part: jax.Array, shape: PoolShape) -> jax.Array:
    if shape.copies == 1:
        return part
    groups = [list(range(i, i + shape.copies)) for i in range(0, shape.tp, shape.copies)]
    page = lax.all_gather(part, TP, axis_index_groups=groups, axis=1, tiled=True)
    return page[:, : shape.layers]
