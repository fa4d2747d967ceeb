"""What jax's client takes of a GPU's memory and, pinned, of the host's. No jax: it reads both once, from the
environment, when it starts.
"""

from __future__ import annotations

from collections.abc import MutableMapping

from jkv.config import GIB

# Of a GPU's whole memory, allocated at the start; jax's default is 0.75. L1 gets what weights and programs
# leave of it (see l1_size), in one piece. Outside of it are CUDA's context, programs' code and the buffers of
# collectives: in all less than 1.3 GB, which is what this leaves of the 16 GB of a small GPU.
MEMORY_FRACTION = 0.92
# The first is the deprecated name of the second; jax refuses both at once.
_FRACTIONS = ("XLA_PYTHON_CLIENT_MEM_FRACTION", "XLA_CLIENT_MEM_FRACTION")
_PINNED_LIMIT = "XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB"


def allow_gpu_memory(environment: MutableMapping[str, str], host_bytes: int) -> None:
    """Has jax's client, which is not started yet, take `MEMORY_FRACTION`, and pin up to `host_bytes`, where
    XLA's limit is 64 GB; what the environment says already stays.
    """
    if not any(environment.get(name) for name in _FRACTIONS):
        environment[_FRACTIONS[-1]] = str(MEMORY_FRACTION)
    environment.setdefault(_PINNED_LIMIT, str(max(1, host_bytes // GIB)))
