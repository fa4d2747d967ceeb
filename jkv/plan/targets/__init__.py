"""The machines that plans are made for, and what jax needs to compile for one that is not there. No jax: its
compilers read the environment when it starts.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from jkv.errors import ConfigError
from jkv.plan.chips import TPU_V5E, TPU_V6E, Chip

if TYPE_CHECKING:
    from jkv.engine.programs import Platform

# The release that goes with the jax that jkv is tested with.
LIBTPU = "libtpu==0.0.42.1"
_LIBRARY = "TPU_LIBRARY_PATH"
_ANYWHERE = {"JAX_PLATFORMS": "cpu", "JAX_ENABLE_COMPILATION_CACHE": "false"}
_TPU = {
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "true",  # there is no chip that two processes could fight over
}


@dataclass(frozen=True, kw_only=True)
class Target:
    """A slice or server with `chips` of one kind. `topology` is jax's name of it; `chip` is None for this
    machine's CPU, whose speed is not published but measured.
    """

    name: str
    platform: Platform
    chip: Chip | None
    chips: int
    topology: str
    variables: Mapping[str, str]

    def environment(self) -> dict[str, str]:
        """What must be set before jax starts.

        Raises:
            ConfigError: the platform's compiler is not installed; the message says how to get it.
        """
        found = {_LIBRARY: str(self._libtpu())} if self.platform == "tpu" else {}
        return {**_ANYWHERE, **self.variables, **found}

    def _libtpu(self) -> Path:
        library = find_libtpu()
        if library is None:
            raise ConfigError(
                f"--target {self.name}: compiling for it needs libtpu: pip install {LIBTPU}, or set "
                f"{_LIBRARY} to a libtpu.so"
            )
        return library


def find_libtpu() -> Path | None:
    """TPU_LIBRARY_PATH, the one that `scripts/test` puts beside the packages, where nothing else sees it, or
    a package's; None where there is none.
    """
    if given := os.environ.get(_LIBRARY):
        return Path(given)
    if beside := sorted(Path(sys.prefix).glob("libtpu-*/libtpu/libtpu.so")):
        return beside[-1]
    spec = find_spec("libtpu")
    return Path(spec.origin).with_name("libtpu.so") if spec is not None and spec.origin else None


def _tpu(kind: str, accelerator: str, chip: Chip) -> Target:
    """A slice of four chips, the smallest there is."""
    return Target(
        name=f"tpu-{kind}:2x2",
        platform="tpu",
        chip=chip,
        chips=4,
        topology=f"{kind}:2x2",
        variables={**_TPU, "TPU_ACCELERATOR_TYPE": accelerator},
    )


_ALL = (
    _tpu("v5e", "v5litepod-4", TPU_V5E),
    _tpu("v6e", "v6e-4", TPU_V6E),
    Target(name="cpu", platform="cpu", chip=None, chips=1, topology="", variables={}),
)
TARGETS: Mapping[str, Target] = {target.name: target for target in _ALL}
