"""The flags of `python -m jkv.plan`."""

from __future__ import annotations

from dataclasses import dataclass

from jkv import flags
from jkv.config import ServeConfig
from jkv.flags import flag, same_flag
from jkv.plan.targets import TARGETS, Target

# What decides an engine's programs and memory, with the meaning it has for `python -m jkv.serve`.
_OF_SERVE = (
    "ep",
    "dtype",
    "kv_dtype",
    "page_size",
    "max_model_len",
    "max_num_seqs",
    "max_batched_tokens",
)


@dataclass(frozen=True, kw_only=True)
class PlanOptions:
    """What to plan for.

    Raises:
        ConfigError: a value out of its range.
    """

    model: str = flag(
        "smollm2-135m-instruct",
        group="model",
        help="a directory with config.json, such a file, a built-in name, a Hugging Face repository, or a "
        ".gguf file; weights are not read",
    )
    target: str = flag(
        "cpu", group="target", choices=tuple(TARGETS), help="the machine to plan for; cpu is this one"
    )
    tp: int | None = flag(
        group="target",
        metavar="N",
        minimum=1,
        default_text="as many of its chips as the model can be split over",
        help="chips that share the model",
    )
    ep: bool = same_flag(ServeConfig, "ep")
    dtype: str = same_flag(ServeConfig, "dtype")
    kv_dtype: str = same_flag(ServeConfig, "kv_dtype")
    page_size: int = same_flag(ServeConfig, "page_size")
    max_model_len: int | None = same_flag(ServeConfig, "max_model_len")
    max_num_seqs: int = same_flag(ServeConfig, "max_num_seqs")
    max_batched_tokens: int = same_flag(ServeConfig, "max_batched_tokens")
    json: bool = flag(False, group="report", help="print one JSON object instead of a table")

    def __post_init__(self) -> None:
        flags.check(self)
        self.serve(1)

    def serve(self, tp: int) -> ServeConfig:
        """The configuration of a server with these flags, on `tp` chips."""
        given = {name: getattr(self, name) for name in _OF_SERVE}
        # Decides no program, and its default may be more than --max-batched-tokens.
        return ServeConfig(max_mixed_tokens=1, tp=tp, **given)

    @property
    def machine(self) -> Target:
        return TARGETS[self.target]
