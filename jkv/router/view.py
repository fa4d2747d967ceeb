"""What a router knows of its engines' caches and load, and the choices that it makes of that."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from jkv.api import jkv_pb2 as pb
from jkv.cache.keys import page_keys, request_root
from jkv.router.engines import Engine, Sent
from jkv.router.index import HolderPages, page_hashes
from jkv.router.policy import Choice, policy
from jkv.router.routing import Prompt, Routing, Target
from jkv.router.score import EngineScore

SharedHolders = Callable[[Sequence[Engine]], Sequence[tuple[str, ...]]]


class View:
    """The index by engine, and the policy. Owner: the event loop.

    Engines that are given together are of one model. Without a salt (None) nothing is cached.
    """

    def __init__(self, policy_name: str) -> None:
        self._routing = Routing(policy(policy_name))
        # For each of some engines, other holders whose L3 pages it can read too.
        self.shared_l3: SharedHolders = lambda engines: [()] * len(engines)
        self._index = self._routing.index

    @property
    def pages(self) -> int:
        return self._index.pages

    @property
    def nbytes(self) -> int:
        return self._index.nbytes

    def pages_of(self, engine: Engine) -> HolderPages:
        """The part of the index that its follower writes."""
        return self.holder(engine.holder)

    def forget(self, engine: Engine) -> None:
        self.drop(engine.holder)

    def holder(self, name: str) -> HolderPages:
        """See `GlobalIndex.holder`."""
        return self._index.holder(name)

    def drop(self, name: str) -> None:
        """See `GlobalIndex.drop`."""
        self._index.drop(name)

    def tidy(self) -> None:
        """Give back a little of what forgotten pages take."""
        self._index.sweep()

    def digest(self, engine: Engine) -> list[pb.TierDigest]:
        """Of the tiers that the engine has."""
        tiers = set(engine.description.tiers) if engine.description is not None else set()
        return [
            pb.TierDigest(tier=tier.value, pages=one.pages, checksum=one.checksum)
            for tier, one in self.pages_of(engine).digest().items()
            if tier in tiers
        ]

    def pages_by_tier(self, engine: Engine) -> dict[str, int]:
        return {one.tier: one.pages for one in self.digest(engine)}

    def predict(self, engine: Engine, token_ids: Sequence[int], cache_salt: str) -> int:
        """How many tokens of a prompt this engine would take from its cache."""
        pages = _prompt(engine, token_ids, cache_salt).pages
        matched = int(self._index.match(pages, [engine.holder]).sum())
        return min(matched * _describe(engine).page_size, len(token_ids) - 1)

    def choose(self, engines: Sequence[Engine], token_ids: Sequence[int], cache_salt: str | None) -> Sent:
        """Choose one, and count the request as sent to it until `finished`."""
        targets, prompt = self._targets(engines), _prompt(engines[0], token_ids, cache_salt)
        choice = self._routing.consider(targets, prompt)
        in_flight = self._routing.send(targets[choice.chosen], choice, prompt)
        return Sent(
            engine=engines[choice.chosen], in_flight=in_flight, peer=_peer(engines, choice, prompt.page_size)
        )

    def first_token(self, sent: Sent) -> None:
        """The engine has computed the prompt."""
        if sent.in_flight is not None:
            sent.engine.loads.first_token(sent.in_flight)

    def finished(self, sent: Sent) -> None:
        """The engine does not have it any more."""
        if sent.in_flight is not None:
            sent.engine.loads.finish(sent.in_flight)

    def explain(
        self, engines: Sequence[Engine], token_ids: Sequence[int], cache_salt: str
    ) -> pb.ExplainResponse:
        """What `choose` would do now, and why; the best engine first. Changes nothing."""
        prompt = _prompt(engines[0], token_ids, cache_salt)
        choice = self._routing.consider(self._targets(engines), prompt)
        scores = [_score(engine, choice.scores.one(number)) for number, engine in enumerate(engines)]
        return pb.ExplainResponse(
            prompt_tokens=len(token_ids),
            engines=sorted(scores, key=lambda one: one.ttft_s),
            chosen=engines[choice.chosen].id,
            why=choice.why,
        )

    def _targets(self, engines: Sequence[Engine]) -> list[Target]:
        return [
            Target(
                name=engine.holder,
                loads=engine.loads,
                page_bytes=_describe(engine).page_bytes,
                shared_l3=shared,
            )
            for engine, shared in zip(engines, self.shared_l3(engines), strict=True)
        ]


def _prompt(engine: Engine, token_ids: Sequence[int], cache_salt: str | None) -> Prompt:
    """A prompt in pages, which are the same for all engines of this one's model."""
    about = _describe(engine)
    keys: list[bytes] = []
    if cache_salt is not None:
        keys = page_keys(request_root(about.model_root, cache_salt=cache_salt), token_ids, about.page_size)
    return Prompt(pages=page_hashes(b"".join(keys)), tokens=len(token_ids), page_size=about.page_size)


def _describe(engine: Engine) -> pb.EngineDescription:
    assert engine.description is not None, "an engine that may be chosen has said what it is"
    return engine.description


def _peer(engines: Sequence[Engine], choice: Choice, page_size: int) -> pb.Peer | None:
    """The engine that has most of the prompt, if that is more than the chosen one has."""
    cached = choice.scores.cached_tokens
    most = int(cached.argmax())
    # Of a prompt that is cached as a whole all but the last token count.
    pages = -(-int(cached[most]) // page_size)
    if pages <= -(-int(cached[choice.chosen]) // page_size):
        return None
    return pb.Peer(address=engines[most].address, pages=pages)


def _score(engine: Engine, score: EngineScore) -> pb.EngineScore:
    return pb.EngineScore(
        id=engine.id,
        matched=pb.CachedByTier(l1=score.l1_tokens, l2=score.l2_tokens, l3=score.l3_tokens),
        queue_s=score.queue_s,
        load_s=score.load_s,
        prefill_s=score.prefill_s,
        ttft_s=score.ttft_s,
    )
