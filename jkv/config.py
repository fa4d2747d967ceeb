"""The engine's one configuration object, read once at the top of the process."""

from __future__ import annotations

import re
import uuid
from collections.abc import Sequence
from dataclasses import dataclass

from jkv import flags
from jkv.cache_config import GIB, PAGE_SIZES, CacheConfig, parse_gib
from jkv.cluster_config import ClusterConfig, parse_addresses
from jkv.errors import ConfigError
from jkv.flags import flag
from jkv.processes_config import ProcessesConfig
from jkv.server_config import ServerConfig

__all__ = ["GIB", "PAGE_SIZES", "ServeConfig", "parse_config", "parse_gib"]

_INSTANCE_ID = re.compile(r"[A-Za-z0-9._-]{1,64}")
_DTYPES = ("auto", "float32", "bfloat16")

_MODEL, _SCHEDULING = "model", "scheduling"


def _new_instance_id() -> str:
    return uuid.uuid4().hex[:12]


@dataclass(frozen=True, kw_only=True)
class _ModelConfig:
    """The part of `ServeConfig` that loading a model reads."""

    model: str = flag(
        "smollm2-135m-instruct",
        group=_MODEL,
        help="a built-in name, a Hugging Face repository, a directory with safetensors, or a .gguf file",
    )
    served_model_name: str | None = flag(
        group=_MODEL, metavar="NAME", default_text="--model", help="the name that clients see and may ask for"
    )
    dtype: str = flag(
        "auto",
        group=_MODEL,
        choices=_DTYPES,
        help="dtype of weights and activations; auto suits the platform",
    )
    tp: int = flag(
        1,
        group=_MODEL,
        metavar="N",
        minimum=1,
        help="devices that share the model (tensor parallelism), each with a part of the heads and layers",
    )
    ep: bool = flag(
        False,
        group=_MODEL,
        help="with --tp, give each device some whole experts of a mixture, not a part of each",
    )
    load_workers: int = flag(
        4, group=_MODEL, minimum=1, maximum=64, help="threads that read the checkpoint's tensors"
    )
    seed: int = flag(
        0,
        group=_MODEL,
        minimum=0,
        maximum=2**32 - 1,
        help="base of the random seeds of requests that bring none",
    )


@dataclass(frozen=True, kw_only=True)
class _SchedulingConfig:
    """The part of `ServeConfig` that says how much runs, waits and is computed at a time."""

    max_model_len: int | None = flag(
        group=_SCHEDULING,
        minimum=2,
        default_text="the model's context length",
        help="longest sequence in tokens, prompt and completion together",
    )
    max_num_seqs: int = flag(
        16, group=_SCHEDULING, minimum=1, maximum=4096, help="sequences that run at the same time"
    )
    max_batched_tokens: int = flag(
        512,
        group=_SCHEDULING,
        minimum=1,
        maximum=65536,
        help="prompt tokens computed in one step when nothing else runs",
    )
    max_mixed_tokens: int = flag(
        64,
        group=_SCHEDULING,
        minimum=1,
        maximum=65536,
        help="prompt tokens computed beside running streams in one step: lower is smoother, higher faster",
    )
    max_queue: int = flag(
        1024, group=_SCHEDULING, minimum=1, help="requests that may wait; one more is refused as overload"
    )
    batch_invariant: bool = flag(
        False, group=_SCHEDULING, help="give a request the same bits whatever it is batched with or hits"
    )


@dataclass(frozen=True, kw_only=True)
class ServeConfig(ServerConfig, ClusterConfig, _SchedulingConfig, CacheConfig, ProcessesConfig, _ModelConfig):
    """Everything `python -m jkv.serve` can be told. Of its bases the last one's flags come first in the help.

    Raises:
        ConfigError: a value out of its range, or values that contradict each other.
    """

    instance_id: str = flag(
        default_factory=_new_instance_id,
        group="server",
        metavar="ID",
        default_text="random",
        help="this process's name in logs and in the cluster: letters, digits, '.', '_' and '-'",
    )
    advertise: str | None = flag(
        group="cluster",
        metavar="HOST:PORT",
        default_text="--host and --grpc-port",
        help="where routers and other engines reach this one",
    )

    def __post_init__(self) -> None:
        flags.check(self)
        self.check_cache()
        self.check_cluster()
        self.check_server()
        self.check_processes(self.tp)
        self._check_advertise()
        if self.max_mixed_tokens > self.max_batched_tokens:
            raise ConfigError(
                f"--max-mixed-tokens {self.max_mixed_tokens}: must not exceed "
                f"--max-batched-tokens {self.max_batched_tokens}"
            )
        if not _INSTANCE_ID.fullmatch(self.instance_id):
            raise ConfigError(
                f"--instance-id {self.instance_id!r}: must be 1 to 64 letters, digits, '.', '_' or '-'"
            )
        if not self.model.strip():
            raise ConfigError(f"--model {self.model!r}: must not be empty")
        if self.served_model_name is not None and not self.served_model_name.strip():
            raise ConfigError(f"--served-model-name {self.served_model_name!r}: must not be empty")

    def _check_advertise(self) -> None:
        if self.advertise is None:
            return
        if self.etcd is None:
            raise ConfigError(f"--advertise {self.advertise}: needs --etcd")
        if len(parse_addresses("advertise", self.advertise)) > 1:
            raise ConfigError(f"--advertise {self.advertise}: must be one HOST:PORT")


def parse_config(argv: Sequence[str] | None = None) -> ServeConfig:
    """The configuration of `python -m jkv.serve`; see `jkv.flags.parse` for what it raises."""
    return flags.parse(
        ServeConfig,
        argv,
        prog="python -m jkv.serve",
        description="Serve a model over gRPC, with a KV cache that outlives the request.",
    )
