from __future__ import annotations

from itertools import islice, pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jkv.bench.load import PromptShape, poisson_arrivals, prompts
from jkv.errors import ConfigError


def draw(count: int = 4, **fields: Any) -> list[tuple[int, ...]]:
    shape = PromptShape(**{"input_len": 32, "vocab_size": 1000, "seed": 0, **fields})
    return list(islice(prompts(shape), count))


@given(
    input_len=st.integers(1, 60),
    prefix=st.floats(0, 0.99),
    vocab_size=st.integers(2, 50_000),
    seed=st.integers(0, 2**64),
)
def test_prompts_have_the_length_the_prefix_and_ids_of_the_vocabulary(
    input_len: int, prefix: float, vocab_size: int, seed: int
) -> None:
    prefix_len = int(input_len * prefix)
    drawn = draw(input_len=input_len, prefix_len=prefix_len, vocab_size=vocab_size, seed=seed)
    assert {len(prompt) for prompt in drawn} == {input_len}
    assert len({prompt[:prefix_len] for prompt in drawn}) == 1
    assert all(type(token) is int and 0 <= token < vocab_size for prompt in drawn for token in prompt)
    assert drawn == draw(input_len=input_len, prefix_len=prefix_len, vocab_size=vocab_size, seed=seed)


def test_distinct_prompts_part_at_the_prefix() -> None:
    first, second = draw(2, input_len=512, prefix_len=256)
    assert first[256:264] != second[256:264]


def test_same_prompt_repeats_the_first() -> None:
    assert draw(3, same_prompt=True) == draw(1) * 3


@pytest.mark.parametrize("other", [{"seed": 1}, {"series": "background"}, {"input_len": 64}])
def test_other_loads_share_no_page(other: dict[str, Any]) -> None:
    heads = {prompt[:8] for prompt in draw()}
    assert heads.isdisjoint(prompt[:8] for prompt in draw(**other))


def test_the_prefix_of_a_seed_is_the_same_in_every_load() -> None:
    assert draw(1, prefix_len=8)[0][:8] == draw(1, prefix_len=16, input_len=64, series="x")[0][:8]


@pytest.mark.parametrize("prefix_len", [-1, 32, 33])
def test_a_prefix_must_be_shorter_than_the_prompt(prefix_len: int) -> None:
    with pytest.raises(ConfigError, match=f"--prefix-len {prefix_len}: .*--input-len 32"):
        draw(prefix_len=prefix_len)


def test_arrivals_are_poisson_seeded_and_start_at_once() -> None:
    arrivals = poisson_arrivals(20_000, 4.0, seed=3)
    gaps = [after - before for before, after in pairwise(arrivals)]
    mean = sum(gaps) / len(gaps)
    deviation = (sum((gap - mean) ** 2 for gap in gaps) / len(gaps)) ** 0.5
    assert arrivals[0] == 0.0
    assert min(gaps) >= 0
    assert mean == pytest.approx(0.25, rel=0.05)
    assert deviation == pytest.approx(mean, rel=0.05)  # as an exponential's
    assert arrivals == poisson_arrivals(20_000, 4.0, seed=3) != poisson_arrivals(20_000, 4.0, seed=4)
