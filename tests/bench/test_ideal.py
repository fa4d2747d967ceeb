from __future__ import annotations

from jkv.bench.ideal import IdealCache


def test_full_pages_of_prompts_and_answers_are_hits() -> None:
    ideal = IdealCache(4)
    prompt = tuple(range(6))
    assert ideal.hit_tokens(prompt) == 0
    ideal.add(prompt, (90, 91, 92))  # 8 tokens computed: 92 was never an input
    assert ideal.pages == 2
    assert ideal.hit_tokens((*prompt, 90, 91, 92, 5)) == 8
    assert ideal.hit_tokens((*prompt, 80, 81, 82)) == 4


def test_the_last_token_is_never_a_hit() -> None:
    ideal = IdealCache(4)
    ideal.add(tuple(range(8)), (9,))
    assert ideal.hit_tokens(tuple(range(8))) == 7


def test_a_page_after_a_gap_is_no_hit() -> None:
    ideal = IdealCache(2)
    ideal.add((1, 2, 3, 4), (5,))
    assert ideal.hit_tokens((9, 9, 3, 4, 5)) == 0
