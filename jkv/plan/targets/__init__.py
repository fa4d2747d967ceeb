"""The machines that plans are made for, and what jax needs to compile for one that is not there. No jax: its
compilers read the environment when it starts.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import resources
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from jkv.errors import ConfigError
from jkv.plan.chips import H100, TPU_V5E, TPU_V6E, Chip

if TYPE_CHECKING:
    from jkv.engine.programs import Platform

# The releases that go with the jax that jkv is tested with.
LIBTPU = "libtpu==0.0.42.1"
CUDA = "jax-cuda12-plugin==0.10.2 jax-cuda12-pjrt==0.10.2 'nvidia-cuda-nvcc-cu12==12.9.*'"
_LIBRARY = "TPU_LIBRARY_PATH"
_ANYWHERE = {
    "JAX_PLATFORMS": "cpu",
    "JAX_ENABLE_COMPILATION_CACHE": "false",
    "TF_CPP_MIN_LOG_LEVEL": "2",  # XLA warns of memory that no program takes in the end
}
_TPU = {
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "true",  # there is no chip that two processes could fight over
}


@dataclass(frozen=True, kw_only=True)
class Target:
    """A slice or server with `chips` of one kind. `topology` is jax's name of it, `description` a file that
    describes one of its GPUs to XLA; `chip` is None for this machine's CPU, whose speed is not published but
    measured.
    """

    name: str
    platform: Platform
    chip: Chip | None
    chips: int
    topology: str = ""
    description: str = ""
    variables: Mapping[str, str] = field(default_factory=dict)

    def environment(self) -> dict[str, str]:
        """What a process needs that compiles for this target.

        Raises:
            ConfigError: the platform's compiler is not installed; the message says how to get it.
        """
        return {**_ANYWHERE, **self.variables, **self._compiler()}

    def enter(self) -> None:
        """Gives this process, in which jax has not started, the target's environment.

        Raises:
            ConfigError: as `environment`.
        """
        environment = self.environment()
        sys.path[:0] = filter(None, environment.get("PYTHONPATH", "").split(os.pathsep))
        os.environ.update(environment)

    def options(self) -> dict[str, str]:
        """What jax wants to be told of the topology beside its name."""
        if not self.description:
            return {"topology_name": self.topology}
        text = resources.files(__name__).joinpath(self.description).read_text()
        return {"topology": self.topology, "target_config": text}

    def _compiler(self) -> dict[str, str]:
        if self.platform == "cpu":
            return {}
        if self.platform == "tpu":
            if (library := find_libtpu()) is not None:
                return {_LIBRARY: str(library)}
            raise ConfigError(
                f"--target {self.name}: compiling for it needs libtpu: pip install {LIBTPU}, or set "
                f"{_LIBRARY} to a libtpu.so"
            )
        if (packages := find_cuda()) is not None:
            return _cuda(packages)
        raise ConfigError(
            f"--target {self.name}: compiling for it needs jax's CUDA plugin and ptxas: pip install {CUDA}"
        )


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


def find_cuda() -> Path | None:
    """The folder of the packages that compile for CUDA: one beside the others, as with libtpu, or theirs."""
    if beside := sorted(Path(sys.prefix).glob("cuda12-*/jax_cuda12_plugin")):
        return beside[-1].parent
    spec = find_spec("jax_cuda12_plugin")
    if spec is None or not spec.submodule_search_locations:
        return None
    return Path(next(iter(spec.submodule_search_locations))).parent


def _cuda(packages: Path) -> dict[str, str]:
    """jax finds its plugin on the path, and XLA the tools that make machine code."""
    tools = f"--xla_gpu_cuda_data_dir={packages / 'nvidia' / 'cuda_nvcc'}"
    return {
        "PYTHONPATH": os.pathsep.join(filter(None, (str(packages), os.environ.get("PYTHONPATH")))),
        "XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} {tools}".strip(),
    }


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


def _h100(chips: int) -> Target:
    """A part of a server with eight, or all of a smaller one."""
    return Target(
        name=f"h100:{chips}",
        platform="gpu",
        chip=H100,
        chips=chips,
        topology=f"1x1x{chips}",
        description="h100_sxm.textproto",
    )


_ALL = (
    _tpu("v5e", "v5litepod-4", TPU_V5E),
    _tpu("v6e", "v6e-4", TPU_V6E),
    _h100(1),
    _h100(4),
    Target(name="cpu", platform="cpu", chip=None, chips=1),
)
TARGETS: Mapping[str, Target] = {target.name: target for target in _ALL}
