"""How fast a model could at best run on chips of given speeds. No jax.

A step takes as long as its arithmetic or its memory traffic, whichever is longer (Williams et al., CACM
52(4), 2009); the sums over chips come on top. Attention's part counts only the keys that a query sees.
Padding counts where the engine pads: the rows of a step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from jkv.plan.chips import Chip

# A layer adds up the chips' parts of its attention's and of its MLP's output.
_SUMS_PER_LAYER = 2


@dataclass(frozen=True, kw_only=True)
class Work:
    """What a model's steps have to do. Weights are counted, not their bytes, over all chips and layers;
    `expert_weights` are those of all experts, of which a token takes `experts_per_token` in each layer.
    `kv_bytes` is what one chip keeps of a token in all layers, `host_kv_bytes` what it brings of it from the
    host: chips with copies of a head share that. `windows` has each layer's sliding window.
    """

    chips: int
    hidden_size: int
    num_heads: int
    head_dim: int
    windows: Sequence[int | None]
    layer_weights: int
    expert_weights: int
    experts: int
    experts_per_token: int
    head_weights: int
    weight_bytes: int  # of one weight
    kv_bytes: int
    host_kv_bytes: int

    def products(self, rows: int, sampled: int) -> float:
        """FLOPs of the weights' products, over all chips, of `rows` tokens of which `sampled` get logits."""
        share = self.experts_per_token / self.experts if self.experts else 0.0
        return 2.0 * (rows * (self.layer_weights + share * self.expert_weights) + sampled * self.head_weights)

    def weights_read(self, rows: int, sampled: int) -> float:
        """Bytes of weights, over all chips, that a step must read: of the experts those that some of its
        tokens take, if each takes them by chance.
        """
        untouched = (1 - self.experts_per_token / self.experts) ** rows if self.experts else 1.0
        weights = self.layer_weights + (1 - untouched) * self.expert_weights
        return self.weight_bytes * (weights + (self.head_weights if sampled else 0))

    def keys_seen(self, first: int, last: int) -> int:
        """Keys that the queries at the positions `first` to `last` - 1 see, over all layers."""
        return sum(_seen(last, window) - _seen(first, window) for window in self.windows)

    def keys_read(self, length: int, queries: int) -> int:
        """Keys that a step's last `queries` of a sequence of `length` tokens read, over all layers, if each
        is read once.
        """
        return sum(min(length, length if w is None else w + queries - 1) for w in self.windows)

    def attention(self, keys_seen: int) -> float:
        """FLOPs over all chips: scores, and the sum of values."""
        return 4.0 * self.num_heads * self.head_dim * keys_seen

    def kv_read(self, keys: int) -> float:
        """Bytes on one chip of keys and their values, counted over all layers."""
        return self.kv_bytes / len(self.windows) * keys


@dataclass(frozen=True, kw_only=True)
class Roofline:
    """Bounds for one model on one kind of chip; `flops` are the chip's for the model's dtype."""

    work: Work
    chip: Chip
    flops: float

    def step_seconds(self, rows: int, sampled: int, keys_seen: int, keys_read: int) -> float:
        """A step of `rows` tokens, padding included."""
        work = self.work
        arithmetic = (work.products(rows, sampled) + work.attention(keys_seen)) / work.chips / self.flops
        moved = work.weights_read(rows, sampled) / work.chips + work.kv_read(keys_read) + rows * work.kv_bytes
        return max(arithmetic, moved / self.chip.memory_bytes_per_s) + self._sums_seconds(rows)

    def decode_tokens_per_s(self, batch: int, context: int) -> float:
        """Of `batch` sequences together, each with `context` tokens."""
        rows = padded(batch)
        keys = batch * self.work.keys_seen(context - 1, context)
        return batch / self.step_seconds(rows, rows, keys, keys)

    def prefill_seconds(self, prompt: int, chunk: int) -> float:
        """Until the prompt's last token is computed and its logits are."""
        seconds = 0.0
        for first in range(0, prompt, chunk):
            last = min(first + chunk, prompt)
            seen = self.work.keys_seen(first, last)
            read = self.work.keys_read(last, last - first)
            seconds += self.step_seconds(padded(last - first), int(last == prompt), seen, read)
        return seconds

    def restore_seconds(self, tokens: int) -> float:
        """Copying their pages from the host's memory; every chip has its own link and its own part."""
        return tokens * self.work.host_kv_bytes / self.chip.host_bytes_per_s

    def _sums_seconds(self, rows: int) -> float:
        """All-reduces as on a ring, which sends (n - 1) / n of the bytes twice."""
        chips = self.work.chips
        sent = 2 * (chips - 1) / chips * rows * self.work.hidden_size * self.work.weight_bytes
        return len(self.work.windows) * _SUMS_PER_LAYER * sent / self.chip.link_bytes_per_s


def padded(rows: int) -> int:
    """The power of two that the engine pads `rows` tokens to."""
    return 1 << (rows - 1).bit_length()


def _seen(queries: int, window: int | None) -> int:
    """Keys that the first `queries` positions see together: position i sees i + 1, at most `window`."""
    full = queries if window is None else min(queries, window)
    return full * (full + 1) // 2 + (queries - full) * (window or 0)
