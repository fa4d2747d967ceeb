"""What the default model answers over the wire."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from jkv.api import jkv_pb2 as pb
from tests.e2e.calls import collect, greedy, ids, messages, settled
from tests.e2e.server import Server

Golden = dict[str, dict[str, Any]]
FULL = (
    "system-prompt",
    "multi-turn",
    "code",
    "empty-ish",
    "raw-one-token",
    "json",
    "long-doc-3k",
    "long-doc-6k",
    "list",
)
_salts = (f"answers {number}" for number in itertools.count())


@pytest.mark.parametrize(
    "name",
    ["capital", "unicode", "raw-completion", *(pytest.param(one, marks=pytest.mark.full) for one in FULL)],
)
def test_golden_cases(smollm2: Server, golden: Golden, name: str) -> None:
    case = golden[name]
    source: dict[str, Any] = (
        {"messages": messages(case)} if "messages" in case else {"prompt": case["prompt"]}
    )
    assert list(smollm2.stub.Tokenize(pb.TokenizeRequest(**source)).ids) == case["prompt_ids"]
    sampling = greedy(len(case["greedy_ids"]))
    answer = collect(smollm2.stub.Generate(pb.GenerateRequest(sampling=sampling, **source)))
    choice, usage = answer.choices[0], answer.usages[0]
    certain = settled(case)
    assert choice.token_ids[:certain] == case["greedy_ids"][:certain]
    assert usage.prompt_tokens == len(case["prompt_ids"])
    assert usage.completion_tokens == len(choice.token_ids)
    if certain == len(case["greedy_ids"]):
        assert choice.text == case["text"]
        assert choice.finish_reason == ("stop" if case["greedy_ids"][-1] == 2 else "length")


def test_messages_prompt_and_token_ids_are_three_ways_to_say_the_same(
    smollm2: Server, golden: Golden
) -> None:
    case = golden["capital"]
    sources: list[dict[str, Any]] = [
        {"messages": messages(case)},
        {"prompt": case["rendered"]},
        {"token_ids": ids(case["prompt_ids"])},
    ]
    for source in sources:
        answer = collect(smollm2.stub.Generate(pb.GenerateRequest(sampling=greedy(20), **source)))
        assert answer.choices[0].token_ids == case["greedy_ids"]
        assert answer.choices[0].text == case["text"]
        assert answer.choices[0].finish_reason == "stop"


@pytest.mark.parametrize(("length", "cached"), [(69, 64), (128, 127), (129, 128), (63, 0)])
def test_a_repeated_prompt_is_cached(smollm2: Server, golden: Golden, length: int, cached: int) -> None:
    prompt = golden["long-doc-3k"]["prompt_ids"][:length]
    request = pb.GenerateRequest(token_ids=ids(prompt), sampling=greedy(8), cache_salt=next(_salts))
    cold, hit = (collect(smollm2.stub.Generate(request)) for _ in range(2))
    assert cold.usages[0].cached_tokens == 0
    assert hit.usages[0].cached_tokens == cached
    assert hit.usages[0].cached_by_tier.l1 == cached
    assert hit.choices == cold.choices
    request.no_cache = True
    assert collect(smollm2.stub.Generate(request)).usages[0].cached_tokens == 0


@pytest.mark.parametrize("text", ["日本語", "🎉🎊", "Ωμέγα"])
def test_no_delta_ends_inside_a_character(smollm2: Server, text: str) -> None:
    """Prompt and bias make the model repeat `text`, whose characters take several tokens."""
    pieces = list(smollm2.stub.Tokenize(pb.TokenizeRequest(prompt=text)).ids)
    prompt = pb.GenerateRequest(prompt=f"Repeat after me: {(text + ' ') * 12}")
    prompt.sampling.CopyFrom(greedy(48, ignore_eos=True, logit_bias=dict.fromkeys(pieces, 10.0)))
    chunks = list(smollm2.stub.Generate(prompt))
    answer = collect(chunks)
    whole = smollm2.stub.Detokenize(pb.DetokenizeRequest(ids=answer.choices[0].token_ids)).text
    assert answer.choices[0].text == whole
    assert text in whole
    assert any(chunk.token_ids and not chunk.text for chunk in chunks), "no character was split"
    assert not any("\ufffd" in chunk.text for chunk in chunks[:-1])


@pytest.mark.parametrize(
    ("stop", "text"),
    [
        ("Paris", "The capital of France is "),
        (" is Par", "The capital of France"),
        ("e is", "The capital of Franc"),
        ("The capital", ""),
    ],
)
def test_a_stop_string_ends_the_text_before_it(smollm2: Server, golden: Golden, stop: str, text: str) -> None:
    sampling = greedy(20, stop=["no such text", stop])
    request = pb.GenerateRequest(messages=messages(golden["capital"]), sampling=sampling)
    seen = ""
    for chunk in smollm2.stub.Generate(request):
        seen += chunk.text
        assert text.startswith(seen), "part of the stop string, or text after it"
    assert seen == text


def test_text_that_only_began_like_a_stop_string_is_given_out(smollm2: Server, golden: Golden) -> None:
    sampling = greedy(20, stop=["Paris, Texas", "Paris.\n"])
    request = pb.GenerateRequest(messages=messages(golden["capital"]), sampling=sampling)
    assert collect(smollm2.stub.Generate(request)).choices[0].text == golden["capital"]["text"]


def test_stop_tokens_and_length(smollm2: Server, golden: Golden) -> None:
    case = golden["capital"]
    for sampling, count, reason in (
        (greedy(20, stop_token_ids=[case["greedy_ids"][3]]), 4, "stop"),
        (greedy(5), 5, "length"),
        (greedy(12, ignore_eos=True), 12, "length"),
    ):
        request = pb.GenerateRequest(messages=messages(case), sampling=sampling)
        choice = collect(smollm2.stub.Generate(request)).choices[0]
        assert (len(choice.token_ids), choice.finish_reason) == (count, reason)


def test_several_sequences_are_those_of_their_own_seeds(smollm2: Server) -> None:
    def ask(**sampling: Any) -> Any:
        sampling = {"max_tokens": 12, "temperature": 1.0, "top_p": 0.95, "ignore_eos": True, **sampling}
        request = pb.GenerateRequest(prompt="Once upon a time", sampling=pb.Sampling(**sampling))
        return collect(smollm2.stub.Generate(request))

    together = ask(n=3, seed=7)
    assert sorted(together.choices) == [0, 1, 2]
    assert all(usage.completion_tokens == 12 for usage in together.usages.values())
    alone = [ask(seed=7 + index).choices[0] for index in range(3)]
    assert [together.choices[index] for index in range(3)] == alone
    assert len({choice.text for choice in alone}) == 3


def test_logprobs_are_the_models_own(smollm2: Server, golden: Golden) -> None:
    case = golden["capital"]
    sampling = greedy(len(case["greedy_ids"]), logprobs=True, top_logprobs=5)
    request = pb.GenerateRequest(messages=messages(case), sampling=sampling)
    chunks = list(smollm2.stub.Generate(request))
    entries = [entry for chunk in chunks for entry in chunk.logprobs]
    assert [entry.id for entry in entries] == case["greedy_ids"]
    assert all(entry.logprob == entry.top[0].logprob < 0 for entry in entries)
    first, (best, logit) = entries[0], case["first_top5_logits"][0]
    assert first.id == best
    assert first.logprob == pytest.approx(case["first_logprob"], abs=5e-4)
    assert [item.id for item in first.top] == [token for token, _ in case["first_top5_logits"]]
    differences = [item.logprob - first.logprob for item in first.top]
    assert differences == pytest.approx([value - logit for _, value in case["first_top5_logits"]], abs=5e-4)
