"""How a chip's memory divides among weights, L1 and the rest. No jax."""

from __future__ import annotations

from dataclasses import dataclass

from jkv.engine.l1_size import Budget


@dataclass(frozen=True, kw_only=True)
class ChipMemory:
    """Bytes of one chip. `budget` was made before L1 had its `pages`; `needed` adds up what the programs
    compiled with that L1 say: the pool that they update, the most that one has in temporaries and outputs,
    weights, other buffers and all programs' code. Beside it comes `budget.reserve`.
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
