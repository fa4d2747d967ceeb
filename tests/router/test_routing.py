from __future__ import annotations

from jkv.cache.keys import page_keys
from jkv.cache.pages import Tier
from jkv.router.index import page_hashes
from jkv.router.load import EngineLoads, NothingReported, loads_of
from jkv.router.policy import policy
from jkv.router.routing import Prompt, Routing, Target

_PAGE = 4
_REPORT = NothingReported(max_num_seqs=8, prefill_tokens_per_s=100.0)


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def _target(clock: Clock, name: str, **fields: tuple[str, ...]) -> Target:
    target = Target(name=name, loads=EngineLoads(clock), page_bytes=1000, **fields)
    target.loads.take(_REPORT)
    return target


def _keys(tokens: range) -> bytes:
    return b"".join(page_keys(b"r" * 16, tokens, _PAGE))


def _prompt(tokens: range) -> Prompt:
    return Prompt(pages=page_hashes(_keys(tokens)), tokens=len(tokens), page_size=_PAGE)


def test_a_prompt_goes_where_its_prefix_is() -> None:
    routing, clock = Routing(policy("cache-aware")), Clock()
    targets = [_target(clock, name) for name in "abc"]
    routing.index.holder("b").update(Tier.L1, _keys(range(80)), b"")
    choice = routing.consider(targets, _prompt(range(100)))
    assert choice.score.id == "b"
    assert choice.score.l1_tokens == 80


def test_equal_prompts_at_once_wait_for_the_first() -> None:
    routing, clock = Routing(policy("cache-aware")), Clock()
    targets = [_target(clock, name) for name in "abcd"]
    names = []
    for prompt in [_prompt(range(4000)), _prompt(range(9000, 13_000))]:
        for _ in range(2):
            choice = routing.consider(targets, prompt)
            routing.send(targets[choice.chosen], choice, prompt)
            names.append(choice.score.id)
    assert names == ["a", "a", "b", "b"]
    again = routing.consider(targets, _prompt(range(4000)))
    assert again.score.id == "a"
    assert again.score.l1_tokens == 3999
    assert loads_of([targets[0].loads]).prefill_tokens == [4001]


def test_what_an_engine_can_read_of_others_counts() -> None:
    routing, clock = Routing(policy("cache-aware")), Clock()
    reader, other = _target(clock, "reader", shared_l3=("store",)), _target(clock, "other")
    routing.index.holder("store").update(Tier.L3, _keys(range(80)), b"")
    choice = routing.consider([other, reader], _prompt(range(100)))
    assert choice.score.id == "reader"
    assert choice.score.l3_tokens == 80


def test_asking_changes_nothing() -> None:
    routing, clock = Routing(policy("cache-aware")), Clock()
    targets = [_target(clock, name) for name in "abc"]
    asked = [routing.consider(targets, _prompt(range(50))).chosen for _ in range(5)]
    assert asked == [0] * 5
    assert all(target.loads.in_flight == 0 for target in targets)
