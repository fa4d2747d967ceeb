"""`python -m jkv.bench attention`: how fast this device attends, beside a copy in the same memory.

Options and report; what runs on the device is in jkv.bench.attention_timing, for only it needs jax.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from jkv import flags
from jkv.bench.options import ReportOptions
from jkv.bench.report import Report, Row
from jkv.config import ServeConfig
from jkv.errors import ConfigError
from jkv.flags import flag


@dataclass(frozen=True, kw_only=True)
class AttentionOptions(ReportOptions):
    """What is attended to, and with which heads.

    Raises:
        ConfigError: a value out of its range.
    """

    heads: int = flag(32, group="shape", minimum=1, help="query heads on the device")
    kv_heads: int = flag(8, group="shape", minimum=1, help="KV heads on the device; they divide --heads")
    head_dim: int = flag(128, group="shape", minimum=8, maximum=256, help="elements of a head")
    window: int | None = flag(
        group="shape", minimum=1, default_text="none", help="tokens that a query sees, itself included"
    )
    dtype: str = flags.same_flag(ServeConfig, "dtype")
    kv_dtype: str = flags.same_flag(ServeConfig, "kv_dtype")
    page_size: int = flags.same_flag(ServeConfig, "page_size")
    contexts: str = flag(
        "1024,8192", group="load", metavar="N,N,...", help="tokens in the cache of a sequence"
    )
    seqs: int = flag(8, group="load", minimum=1, help="sequences that decode together")
    chunk: int = flag(
        512, group="load", minimum=2, help="tokens of a prefill chunk, the last of its sequence"
    )
    tune: bool = flag(False, group="load", help="try block sizes around those chosen; print the fastest")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.heads % self.kv_heads:
            raise ConfigError(f"--kv-heads {self.kv_heads}: must divide --heads {self.heads}")
        if min(self.lengths) < self.chunk:
            raise ConfigError(f"--contexts {self.contexts}: must all be --chunk {self.chunk} or more")

    @property
    def lengths(self) -> tuple[int, ...]:
        """The contexts, shortest first."""
        parts = self.contexts.split(",")
        for part in parts:
            if not part.strip().isdecimal() or int(part) < 1:
                raise ConfigError(f"--contexts {self.contexts}: {part!r} is not a length of 1 or more")
        return tuple(sorted(map(int, parts)))


@dataclass(frozen=True, kw_only=True)
class Timing:
    """Attention of one layer once, or with other `blocks` than the engine's if `tuned`.

    `kv_bytes` are the keys and values that it must read; `copy_bytes_per_s` counts what a copy of as many
    bytes reads and writes.
    """

    kind: str  # decode or prefill
    context: int
    seconds: float
    kv_bytes: int
    flops: int
    copy_bytes_per_s: float
    blocks: str
    tuned: bool

    @property
    def share(self) -> float:
        """Of the copy's bandwidth."""
        return self.kv_bytes / self.seconds / self.copy_bytes_per_s


def run(options: AttentionOptions) -> tuple[Report, str]:
    """The report, and what it is of.

    Raises:
        ConfigError: a shape that the device's kernel refuses.
        UnsupportedModelError: likewise.
    """
    from jkv.bench import attention_timing

    timings, subject = attention_timing.measure(options)
    return Report(results=timings, rows=list(_rows(timings)), errors=[]), subject


def _rows(timings: Sequence[Timing]) -> Sequence[Row]:
    head = ("", "context", "us", "KV GB/s", "of a copy", "TFLOP/s", "blocks")
    return [head, *(_row(timing) for timing in timings)]


def _row(timing: Timing) -> Row:
    return (
        f"{timing.kind}, tuned" if timing.tuned else timing.kind,
        str(timing.context),
        f"{timing.seconds * 1e6:.1f}",
        f"{timing.kv_bytes / timing.seconds / 1e9:.1f}",
        f"{timing.share:.2f}",
        f"{timing.flops / timing.seconds / 1e12:.3f}",
        timing.blocks,
    )
