"""Where pages on their own lie: in the host memory of each device's part, or as a whole in process 0's.

Over several processes, L2 and all below it are process 0's: pages arrive there whole, and go up by way of its
first device, from which the others get their parts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, SingleDeviceSharding

from jkv.engine.host_pages import HostPage
from jkv.engine.programs import ProgramPlan
from jkv.kernels.kv_pool import KvArrays
from jkv.kernels.mesh import PAGE, own_devices


class PagePlaces:
    """Puts pages where a plan's programs take and leave them."""

    def __init__(self, plan: ProgramPlan) -> None:
        self._across = plan.across_processes
        one = SingleDeviceSharding(jax.local_devices()[0])
        split = plan.sharding(PAGE)
        self._device = one if split is None or self._across else split
        self._host = self._device.with_memory_kind("pinned_host") if plan.pinned_pages else self._device
        if self._across:
            assert isinstance(split, NamedSharding)
            self._sent = split
            self._nothing = [self._zeros(plan, d) for d in own_devices(split.mesh)]

    def on_host(self, page: KvArrays[np.ndarray]) -> HostPage:
        """Starts copying a page to host memory."""
        return jax.device_put(page, self._host)

    def staged(self, pages: Sequence[HostPage]) -> list[HostPage]:
        """Starts copying pages to the device."""
        return jax.device_put(list(pages), self._device)

    def arguments(self, staged: Sequence[HostPage]) -> list[HostPage]:
        """Staged pages as the scatter programs take them."""
        return [self._send([page, *self._nothing[1:]]) for page in staged] if self._across else list(staged)

    def no_arguments(self, count: int) -> list[HostPage]:
        """What a process that has no pages gives in their place."""
        return [self._send(self._nothing)] * count

    def kept(self, copies: Sequence[HostPage]) -> list[HostPage]:
        """What a gather program left, as pages."""
        if not self._across:
            return list(copies)
        return [jax.tree.map(lambda x: x.addressable_data(0), copy) for copy in copies]

    def _send(self, parts: Sequence[HostPage]) -> HostPage:
        def over_all(*parts: jax.Array) -> jax.Array:
            shape = (self._sent.mesh.size * parts[0].shape[0], *parts[0].shape[1:])
            return jax.make_array_from_single_device_arrays(shape, self._sent, list(parts))

        return jax.tree.map(over_all, *parts)

    @staticmethod
    def _zeros(plan: ProgramPlan, device: Any) -> HostPage:
        def zeros(x: jax.ShapeDtypeStruct) -> jax.Array:
            return jnp.zeros(x.shape, x.dtype, device=SingleDeviceSharding(device))

        return jax.tree.map(zeros, plan.pool.abstract_page())
