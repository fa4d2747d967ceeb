"""`python -m jkv.bench multiturn`: conversations with growing histories; what the cache keeps of them.

All conversations take their turns in rounds, so that between two turns of one all the others pass through
the cache. What it serves is compared with an infinite cache of the same page size.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from jkv.bench.cache_admin import CacheAdmin
from jkv.bench.dialogues import ChatDialogue, Dialogue, read_conversations, synthetic
from jkv.bench.drive import Target
from jkv.bench.grpc_client import TIERS, GrpcClient
from jkv.bench.ideal import IdealCache
from jkv.bench.load import PromptShape
from jkv.bench.metrics import Record, Spread, spread
from jkv.bench.options import TargetOptions
from jkv.bench.report import Report, Row, milliseconds, number
from jkv.errors import ConfigError
from jkv.flags import flag

_LOAD = "load"
_DEFAULT_CLIENTS = 8


@dataclass(frozen=True, kw_only=True)
class MultiturnOptions(TargetOptions):
    """`clients` conversations of `rounds` turns, or those of a file."""

    clients: int | None = flag(
        group=_LOAD,
        exclusive="clients",
        minimum=1,
        default_text=f"{_DEFAULT_CLIENTS}, or all of --conversations",
        help="conversations",
    )
    working_set: float | None = flag(
        group=_LOAD,
        exclusive="clients",
        minimum=0,
        metavar="TIMES",
        default_text="as --clients says",
        help="as many conversations as make this many times the capacity of L1 and L2 together",
    )
    rounds: int = flag(4, group=_LOAD, minimum=1, help="turns of each conversation")
    concurrency: int = flag(1, group=_LOAD, minimum=1, help="requests in flight")
    shared_len: int = flag(
        64, group=_LOAD, minimum=0, help="tokens that all conversations start with: a system prompt"
    )
    first_len: int = flag(
        512, group=_LOAD, minimum=1, help="tokens of each first prompt, the shared included"
    )
    turn_len: int = flag(64, group=_LOAD, minimum=1, help="tokens that the user adds in each later turn")
    output_len: int = flag(32, group=_LOAD, minimum=1, help="most tokens of each answer")
    conversations: str | None = flag(
        group=_LOAD,
        metavar="FILE",
        default_text="random tokens",
        help="users' turns in MT-Bench's format, a JSON object with \"turns\" on each line; the lengths above"
        " do not apply",
    )

    @property
    def longest(self) -> int:
        """Tokens of a synthetic conversation at its end."""
        return self.first_len + self.output_len + (self.rounds - 1) * (self.turn_len + self.output_len)


@dataclass(frozen=True, kw_only=True)
class Hits:
    """Tokens of some requests: what they asked, what the cache served, what an infinite one would have."""

    requests: int
    prompt_tokens: int
    hit_tokens: int
    hit_tokens_by_tier: Mapping[str, int]
    ideal_tokens: int
    of_ideal: float | None  # None where there was nothing to hit
    ttft: Spread | None


@dataclass(frozen=True, kw_only=True)
class MultiturnResults:
    """`working_set_pages` are the different pages of all conversations, the others what the tiers hold."""

    rounds: list[Hits]
    total: Hits
    clients: int
    working_set_pages: int
    capacity_pages: Mapping[str, int]
    working_set_of_l1_l2: float


@dataclass(frozen=True)
class _Turn:
    record: Record
    ideal: int


async def run(options: MultiturnOptions, target: Target) -> Report:
    """Round after round, each conversation's next turn."""
    admin = CacheAdmin(target.client)
    capacity = {name: tier.pages_capacity for name, tier in (await admin.tiers()).items()}
    page_size = target.info.page_size
    if page_size is None:
        raise ConfigError("--target: does not tell its page size")
    dialogues = _dialogues(options, target, page_size, capacity)
    ideal = IdealCache(page_size)
    rounds: list[list[_Turn]] = []
    for _ in range(options.rounds):
        rounds.append(await _round(options, target, dialogues, ideal))
    return _report(len(dialogues), rounds, ideal, capacity)


def _dialogues(
    options: MultiturnOptions, target: Target, page_size: int, capacity: Mapping[str, int]
) -> Sequence[Dialogue]:
    if options.conversations is not None:
        if options.working_set is not None:
            raise ConfigError("--working-set: conversations of a file have no known length; use --clients")
        assert isinstance(target.client, GrpcClient)  # CacheAdmin has asked
        known = read_conversations(Path(options.conversations))
        if options.clients is not None and options.clients > len(known):
            raise ConfigError(f"--clients {options.clients}: {options.conversations} has {len(known)}")
        return [ChatDialogue(turns, target.client) for turns in known[: options.clients]]
    target.check_fits(
        options.longest, f"--first-len, --turn-len, --output-len over --rounds {options.rounds}"
    )
    shape = PromptShape(
        input_len=options.first_len,
        prefix_len=options.shared_len,
        vocab_size=target.vocab_size,
        seed=options.seed,
        series="multiturn",
    )
    return synthetic(_clients(options, page_size, capacity), first=shape, turn_len=options.turn_len)


def _clients(options: MultiturnOptions, page_size: int, capacity: Mapping[str, int]) -> int:
    if options.working_set is None:
        return options.clients or _DEFAULT_CLIENTS
    own = (options.longest - 1) // page_size - options.shared_len // page_size
    if own < 1:
        raise ConfigError(
            f"--working-set: conversations of {options.longest} tokens fill no page of their own"
        )
    return max(1, round(options.working_set * _upper(capacity) / own))


def _upper(capacity: Mapping[str, int]) -> int:
    return capacity.get("l1", 0) + capacity.get("l2", 0)


async def _round(
    options: MultiturnOptions, target: Target, dialogues: Sequence[Dialogue], ideal: IdealCache
) -> list[_Turn]:
    waiting = iter(dialogues)
    turns: list[_Turn] = []

    async def worker() -> None:
        for dialogue in waiting:
            prompt = await dialogue.prompt()
            if prompt is None:
                continue
            expected = ideal.hit_tokens(prompt)
            record = await target.run(prompt, options.output_len, ignore_eos=not dialogue.ends_itself)
            turns.append(_Turn(record, expected))
            if record.ok:
                ideal.add(prompt, record.output_ids)
                await dialogue.answered(record.output_ids)

    try:
        async with asyncio.TaskGroup() as group:
            for _ in range(options.concurrency):
                group.create_task(worker())
    except ExceptionGroup as failed:
        raise failed.exceptions[0] from None  # the target refused to tokenize
    return turns


def _hits(turns: Sequence[_Turn]) -> Hits:
    done = [turn for turn in turns if turn.record.ok]
    by_tier = Counter[str]()
    for turn in done:
        by_tier.update(turn.record.cached_by_tier or {})
    hits = sum(turn.record.cached_tokens or 0 for turn in done)
    ideal = sum(turn.ideal for turn in done)
    return Hits(
        requests=len(turns),
        prompt_tokens=sum(turn.record.prompt_tokens for turn in done),
        hit_tokens=hits,
        hit_tokens_by_tier={tier: by_tier[tier] for tier in TIERS},
        ideal_tokens=ideal,
        of_ideal=hits / ideal if ideal else None,
        ttft=spread([turn.record.ttft for turn in done]),
    )


def _report(
    clients: int, rounds: Sequence[Sequence[_Turn]], ideal: IdealCache, capacity: Mapping[str, int]
) -> Report:
    every = [turn for turns in rounds for turn in turns]
    results = MultiturnResults(
        rounds=[_hits(turns) for turns in rounds if turns],
        total=_hits(every),
        clients=clients,
        working_set_pages=ideal.pages,
        capacity_pages=dict(capacity),
        working_set_of_l1_l2=ideal.pages / max(_upper(capacity), 1),
    )
    errors = [turn.record.error for turn in every if not turn.record.ok]
    return Report(results=results, rows=_rows(results), errors=errors)


def _rows(results: MultiturnResults) -> list[Row]:
    rows: list[Row] = [
        ("round", "requests", "TTFT p50, ms", "p90", "prompt", "hit", "ideal", "of ideal", *TIERS)
    ]
    named = [*((str(i), hits) for i, hits in enumerate(results.rounds, 1)), ("all", results.total)]
    rows += [(name, *_cells(hits)) for name, hits in named]
    held = ", ".join(f"{name} {pages}" for name, pages in results.capacity_pages.items())
    return [
        *rows,
        ("conversations", str(results.clients)),
        ("pages of all of them", str(results.working_set_pages)),
        (f"of L1 and L2 ({held})", number(results.working_set_of_l1_l2)),
    ]


def _cells(hits: Hits) -> Row:
    return (
        str(hits.requests),
        milliseconds(hits.ttft.p50 if hits.ttft else None),
        milliseconds(hits.ttft.p90 if hits.ttft else None),
        str(hits.prompt_tokens),
        str(hits.hit_tokens),
        str(hits.ideal_tokens),
        "n/a" if hits.of_ideal is None else f"{hits.of_ideal:.1%}",
        *(str(count) for count in hits.hit_tokens_by_tier.values()),
    )
