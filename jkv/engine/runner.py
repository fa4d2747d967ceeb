"""The device's side of the engine: its buffers, and dispatching a step's programs. Owner: the engine's
thread.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jkv.engine.batches import SamplingInputs, build_step, empty_batch
from jkv.engine.host_pages import HostPage, page_from_bytes, page_ready, page_to_bytes
from jkv.engine.page_places import PagePlaces
from jkv.engine.processes import RESET, STOP
from jkv.engine.programs import ADMIT, ProgramPlan, gather_name, sample_name, scatter_name, step_name, weights
from jkv.engine.request import Logprob, SamplingParams
from jkv.engine.sampling import Sampled
from jkv.engine.scheduler import Chunk
from jkv.engine.sequence import Sequence
from jkv.models.params import Params


@dataclass(frozen=True, kw_only=True)
class Pending:
    """A dispatched step whose tokens are still on the device; row i belongs to `seqs[i]`.

    `hidden` is the step's output, ready once it has run.
    """

    seqs: tuple[Sequence, ...]
    hidden: jax.Array
    sampled: Sampled | None

    def read(self) -> list[tuple[Sequence, int, Logprob | None]]:
        """Waits for the step and returns each sequence's token, with log-probabilities where it asked for
        them.
        """
        if self.sampled is None:
            # Else prefill chunks would pile up on the device, and whoever comes or goes would wait for all.
            jax.block_until_ready(self.hidden)
            return []
        tokens = np.asarray(self.sampled.tokens).tolist()
        if not any(s.request.sampling.logprobs for s in self.seqs):
            return [(seq, token, None) for seq, token in zip(self.seqs, tokens, strict=False)]
        rows = (
            np.asarray(self.sampled.logprob),
            np.asarray(self.sampled.top_ids),
            np.asarray(self.sampled.top_logprobs),
        )
        return [
            (seq, tokens[i], _logprob(seq.request.sampling, tokens[i], *(r[i] for r in rows)))
            for i, seq in enumerate(self.seqs)
        ]


class Runner:
    """Holds the parameters, the donated KV pool and the donated sampler state. `tell` has other processes do
    the same, where there are any (see jkv.engine.processes).
    """

    def __init__(
        self,
        plan: ProgramPlan,
        params: Params,
        compiled: Mapping[str, Callable[..., Any]],
        seed: int,
        tell: Callable[..., None] | None = None,
    ) -> None:
        self.plan, self._compiled, self._sampling = plan, compiled, SamplingInputs(plan, seed)
        self._weights, self._head = weights(params), weights(params.head_only())
        self._places, self._tell = PagePlaces(plan), tell or _nobody
        self._replayed: jax.Array | None = None  # hidden states of the last step that was replayed
        self._allocate()

    def reset(self) -> None:
        """Fresh, empty device buffers, as after a step that failed. Pages saved before stay as they are."""
        self._tell(RESET)
        for buffer in jax.tree.leaves((self._pool, self._state)):
            buffer.delete()  # there is hardly room for the old and the new ones
        self._allocate()

    def _allocate(self) -> None:
        self._pool = jax.tree.map(_zeros, self.plan.abstract_pool())
        self._state = jax.tree.map(_zeros, self.plan.abstract_state())
        self._owners: list[tuple[Sequence, int] | None] = [None] * self.plan.max_num_seqs
        self._biased = [False] * self.plan.max_num_seqs

    def dispatch(self, chunks: Seq[Chunk]) -> Pending:
        """Starts a step and returns without waiting for it."""
        for chunk in chunks:
            self._take_slot(chunk.seq)
        step = build_step(chunks, self.plan)
        hidden = self._step(step.tokens, step.packed)
        if not step.sampled:
            return Pending(seqs=(), hidden=hidden, sampled=None)
        sampled = self._sample(hidden, *self._sampling.build(step.sampled))
        sampled.tokens.copy_to_host_async()
        return Pending(seqs=step.sampled, hidden=hidden, sampled=sampled)

    @property
    def page_bytes(self) -> int:
        """Bytes of a page's flat view."""
        return self.plan.pool.page_bytes

    @property
    def host_page_bytes(self) -> int:
        """Bytes that a page takes in host memory."""
        return self.plan.pool.host_page_bytes

    def save(self, pages: Seq[int]) -> list[HostPage]:
        """Starts copying pages of L1 to host memory and returns without waiting.

        The copies are of what the steps dispatched so far leave in the pages; steps and restores dispatched
        later do not change them.
        """
        copies: list[HostPage] = []
        for batch in self._batches(pages):
            copies += self._gather(np.asarray(batch, np.int32))
        return copies

    def stage(self, host_pages: Seq[HostPage]) -> list[HostPage]:
        """Starts copying pages to the device, beside whatever runs there; does nothing on CPU. `restore`
        takes the result, and holds up the steps after it for as long as it is not `ready`.
        """
        return self._places.staged(host_pages)

    def restore(self, pages: Seq[int], host_pages: Seq[HostPage]) -> None:
        """Puts saved pages into pages of L1, in this order between the steps dispatched before and after."""
        staged = iter(self.stage(host_pages))
        for batch in self._batches(pages):
            arguments = self._places.arguments(list(itertools.islice(staged, len(batch))))
            self._scatter(np.asarray(batch, np.int32), arguments)

    def ready(self, page: HostPage) -> bool:
        """Whether the page has arrived, so that nobody waits for it."""
        return page_ready(page)

    def usable(self, page: HostPage) -> bool:
        """Whether the page holds what was saved; waits for it. False where the step before it failed."""
        try:
            jax.block_until_ready(page)
        except Exception:
            return False
        return True

    def wait(self) -> None:
        """Returns when everything dispatched so far has been done to the pool."""
        jax.block_until_ready(self._pool)

    def page_to_bytes(self, page: HostPage) -> np.ndarray:
        """A page's bytes, flat uint8, not to be written to; waits until it has arrived. For any thread."""
        return page_to_bytes(page, self.plan.pool)

    def page_from_bytes(self, data: np.ndarray) -> HostPage:
        """The page that `page_to_bytes` made these bytes of. For any thread.

        Takes `data` over, where it can without a copy: nobody may write to it any more.

        Raises:
            ValueError: `data` is not of one page's size.
        """
        return self._places.on_host(page_from_bytes(data, self.plan.pool))

    def replay(self, name: str, inputs: tuple[Any, ...]) -> None:
        """Does what another process's runner told."""
        kind, _, size = name.partition("/")
        if kind == "step":
            self._replayed = self._step(int(size), *inputs)
        elif kind == "sample":
            self._sample(self._replayed, int(size), *inputs)
        elif kind == "gather":
            self._gather(inputs[0])
        elif kind == "scatter":
            self._scatter(inputs[0], self._places.no_arguments(int(size)))
        else:
            self._set_slot(*inputs)

    def close(self) -> None:
        """Ends the other processes."""
        self._tell(STOP)

    def warm_up(self) -> None:
        """Runs every program once on nothing: a program's first run is slower by half a second (XLA:CPU)."""
        hidden = None
        for tokens in self.plan.token_buckets:
            hidden = self._step(tokens, empty_batch(self.plan, tokens)[0])
        for rows in self.plan.sample_buckets:
            self._sample(hidden, *self._sampling.build((), rows))
        self._admit(0, SamplingParams(max_tokens=1), (), ())
        for count in self.plan.page_buckets:
            nothing = [0] * count
            self.restore(nothing, self.save(nothing))
        jax.block_until_ready((self._pool, self._state))

    def _batches(self, pages: Seq[int]) -> Iterator[Seq[int]]:
        """Cuts `pages` into runs that there are programs for, the longest first."""
        start = 0
        for size in reversed(self.plan.page_buckets):
            while len(pages) - start >= size:
                yield pages[start : start + size]
                start += size

    def _step(self, tokens: int, packed: np.ndarray) -> jax.Array:
        run = self._compiled[step_name(tokens)]
        self._tell(step_name(tokens), packed)
        hidden, self._pool = run(self._weights, self._pool, self._state.last_tokens, packed)
        return hidden

    def _sample(self, hidden: jax.Array | None, rows: int, packed: np.ndarray) -> Sampled:
        draw = self._compiled[sample_name(rows)]
        self._tell(sample_name(rows), packed)
        sampled, self._state = draw(self._head, hidden, self._state, packed)
        return sampled

    def _admit(self, slot: int, params: SamplingParams, prompt: Seq[int], generated: Seq[int]) -> None:
        vocab = self.plan.config.vocab_size
        counts = np.bincount(np.asarray(generated, np.int64), minlength=vocab).astype(np.int32)
        in_prompt = np.zeros(vocab, np.bool_)
        in_prompt[list(prompt)] = True
        bias = np.zeros(vocab, np.float32)
        bias[list(params.logit_bias)] = list(params.logit_bias.values())
        self._set_slot(np.int32(slot), counts, in_prompt, bias)

    def _set_slot(self, *history: Any) -> None:
        self._tell(ADMIT, *history)
        self._state = self._compiled[ADMIT](self._state, *history)

    def _gather(self, numbers: np.ndarray) -> list[HostPage]:
        name = gather_name(len(numbers))
        self._tell(name, numbers)
        return self._places.kept(self._compiled[name](self._pool, numbers))

    def _scatter(self, numbers: np.ndarray, pages: Seq[HostPage]) -> None:
        name = scatter_name(len(numbers))
        self._tell(name, numbers)
        self._pool = self._compiled[name](self._pool, numbers, *pages)

    def _take_slot(self, seq: Sequence) -> None:
        """Writes a sequence's history and bias into the slot it newly got; others' leftovers matter only if
        biased.
        """
        assert seq.slot is not None
        if self._owners[seq.slot] == (seq, seq.admissions):
            return
        self._owners[seq.slot] = (seq, seq.admissions)
        params = seq.request.sampling
        if not params.adjusts_logits and not self._biased[seq.slot]:
            return
        self._biased[seq.slot] = bool(params.logit_bias)
        self._admit(seq.slot, params, seq.request.prompt_ids, seq.tokens[seq.prompt_len :])


def _nobody(name: str, *inputs: Any) -> None:
    """Where there is no other process to tell."""


def _zeros(x: jax.ShapeDtypeStruct) -> jax.Array:
    return jnp.zeros(x.shape, x.dtype, device=x.sharding)


def _logprob(
    params: SamplingParams, token: int, logprob: np.ndarray, ids: np.ndarray, values: np.ndarray
) -> Logprob | None:
    if not params.logprobs:
        return None
    best = zip(ids[: params.top_logprobs].tolist(), values[: params.top_logprobs].tolist(), strict=True)
    return Logprob(token, float(logprob), tuple(best))
