"""The flags of an engine whose devices belong to several processes, mostly one on each host."""

from __future__ import annotations

from dataclasses import dataclass

from jkv.cluster_config import parse_addresses
from jkv.errors import ConfigError
from jkv.flags import flag

_GROUP = "processes"


@dataclass(frozen=True, kw_only=True)
class ProcessesConfig:
    """The part of an engine's configuration that joining its processes reads."""

    coordinator: str | None = flag(
        group=_GROUP,
        metavar="HOST:PORT",
        default_text="one process",
        help="where process 0 awaits the others, when an engine's devices belong to several processes",
    )
    num_processes: int = flag(
        1, group=_GROUP, metavar="N", minimum=1, help="how many they are; all get the same flags and --tp"
    )
    process_id: int = flag(
        0, group=_GROUP, metavar="I", minimum=0, help="which of them this is; process 0 takes the requests"
    )

    def check_processes(self, tp: int) -> None:
        """What single ranges do not say.

        Raises:
            ConfigError: flags that contradict each other.
        """
        count = self.num_processes
        if (self.coordinator is None) != (count == 1):
            raise ConfigError(
                f"--num-processes {count}: several processes need --coordinator, and one has none"
            )
        if self.coordinator is not None and len(parse_addresses("coordinator", self.coordinator)) > 1:
            raise ConfigError(f"--coordinator {self.coordinator}: must be one HOST:PORT")
        if self.process_id >= count:
            raise ConfigError(f"--process-id {self.process_id}: must be less than --num-processes {count}")
        if tp % count:
            raise ConfigError(f"--tp {tp}: must be a multiple of --num-processes {count}")
