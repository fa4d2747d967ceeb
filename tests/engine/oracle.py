"""What transformers computed for the golden cases, and comparing an engine's outcome with it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from tests.engine.harness import Outcome
from tests.models.golden import TINY

# Closer than this, float rounding may decide between the two best tokens.
MARGIN = 0.005
CASES_PER_MODEL = 5
_SMOLLM2 = Path(__file__).parents[1] / "data" / "golden" / "smollm2_135m_instruct.jsonl"


@dataclass(frozen=True, kw_only=True)
class GoldenCase:
    """`margins[i]` is the gap between the two best logits at step i of the greedy decoding."""

    prompt_ids: tuple[int, ...]
    greedy_ids: tuple[int, ...]
    margins: tuple[float, ...]

    @property
    def certain(self) -> int:
        """Greedy tokens before the first that rounding may change."""
        return next((i for i, m in enumerate(self.margins) if m < MARGIN), len(self.greedy_ids))

    def check_tokens(self, outcome: Outcome) -> None:
        assert len(outcome.tokens) == len(self.greedy_ids) or self.certain < len(self.greedy_ids)
        assert outcome.tokens[: self.certain] == self.greedy_ids[: self.certain]


@dataclass(frozen=True, kw_only=True)
class TinyCase(GoldenCase):
    last_logits: np.ndarray  # [positions, vocab] of the prompt's last positions, 8 at most


@dataclass(frozen=True, kw_only=True)
class SmolCase(GoldenCase):
    name: str
    first_logprob: float
    top5: tuple[tuple[int, float], ...]  # id and logit


def tiny_case(model: str, number: int) -> TinyCase:
    with np.load(TINY / model / "expected.npz") as data:
        return TinyCase(
            prompt_ids=tuple(data[f"ids{number}"].tolist()),
            greedy_ids=tuple(data[f"greedy{number}"].tolist()),
            margins=tuple(data[f"margin{number}"].tolist()),
            last_logits=data[f"logits{number}"],
        )


def smol_cases() -> dict[str, SmolCase]:
    cases = [json.loads(line) for line in _SMOLLM2.read_text().splitlines()]
    return {
        c["name"]: SmolCase(
            name=c["name"],
            prompt_ids=tuple(c["prompt_ids"]),
            greedy_ids=tuple(c["greedy_ids"]),
            margins=tuple(c["margins"]),
            first_logprob=c["first_logprob"],
            top5=tuple((token, logit) for token, logit in c["first_top5_logits"]),
        )
        for c in cases
    }


def check_hit(cold: Outcome, hit: Outcome, case: GoldenCase) -> None:
    """Default mode's promise: the same tokens up to a close call, log-probabilities within 1e-4."""
    assert hit.tokens[: case.certain] == cold.tokens[: case.certain]
    np.testing.assert_allclose(_values(hit, case.certain), _values(cold, case.certain), atol=1e-4, rtol=0)


def _values(outcome: Outcome, count: int) -> Sequence[float]:
    return [p.logprob for p in outcome.logprobs[:count]]
