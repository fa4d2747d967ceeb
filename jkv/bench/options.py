"""The flags that every benchmark has."""

from __future__ import annotations

from dataclasses import dataclass

from jkv import flags
from jkv.errors import ConfigError
from jkv.flags import flag


def parse_lengths(text: str) -> tuple[int, ...]:
    """The prompt lengths of `--input-lens`, which are separated by commas.

    Raises:
        ConfigError: a part that is not a length of 1 or more.
    """
    for part in text.split(","):
        if not part.strip().isdecimal() or int(part) < 1:
            raise ConfigError(f"--input-lens {text}: {part!r} is not a length of 1 or more")
    return tuple(int(part) for part in text.split(","))


@dataclass(frozen=True, kw_only=True)
class ReportOptions:
    """How results are told.

    Raises:
        ConfigError: a value out of its range.
    """

    json: bool = flag(False, group="report", help="print one JSON object instead of a table")

    def __post_init__(self) -> None:
        flags.check(self)


@dataclass(frozen=True, kw_only=True)
class ModelOptions(ReportOptions):
    """What is asked of a server, wherever it is."""

    model: str | None = flag(
        group="target",
        metavar="NAME",
        default_text="the one that the target serves",
        help="the model to measure",
    )
    vocab_size: int | None = flag(
        group="target",
        minimum=2,
        default_text="what the target tells; HTTP servers do not",
        help="prompts are made of random token ids below this",
    )
    timeout: float = flag(
        600.0, group="target", metavar="SECONDS", minimum=0.001, help="a request that takes longer has failed"
    )
    seed: int = flag(0, group="load", minimum=0, help="prompts and arrivals of equal seeds are equal")


@dataclass(frozen=True, kw_only=True)
class TargetOptions(ModelOptions):
    """A server that runs already.

    Raises:
        ConfigError: a value out of its range, or no target.
    """

    target: str = flag(
        "",
        group="target",
        metavar="URL",
        default_text="none, required",
        help="grpc://HOST:PORT (jkv), or http://HOST:PORT[/v1] (any OpenAI-compatible server)",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.target:
            raise ConfigError("--target: needed, grpc://HOST:PORT or http://HOST:PORT[/v1]")
