"""How a chip's memory divides among weights, L1 and the rest. No jax."""

from __future__ import annotations

from dataclasses import dataclass

from jkv.engine.l1_size import Budget


@dataclass(frozen=True, kw_only=True)
class ChipMemory:
    """Bytes of one chip. `needed` is the sum of what the compiler says of the programs with an L1 of `pages`:
    arguments, temporaries and outputs of the most demanding one, all programs' code, and the buffers that are
    not its arguments; beside it comes `budget.reserve`.
    """

    total: int
    weights: int
    budget: Budget  # of what the weights leave
    page: int
    pages: int
    needed: int

    @property
    def l1(self) -> int:
        return self.page * self.pages

    @property
    def fits(self) -> bool:
        return self.needed <= self.total
