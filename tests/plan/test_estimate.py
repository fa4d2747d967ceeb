from __future__ import annotations

from jkv.plan.estimate import Decode, batches, estimate, steps
from tests.plan.test_roofline import BUSY


def test_batches_and_lengths_end_with_the_most_that_a_server_takes() -> None:
    assert batches(1) == [1]
    assert batches(16) == [1, 4, 16]
    assert batches(20) == [1, 4, 16, 20]
    assert steps((1024, 8192), 1024) == [1024]
    assert steps((1024, 8192), 9000) == [1024, 8192, 9000]


def test_what_l1_does_not_hold_has_no_speed() -> None:
    found = estimate(BUSY, max_model_len=5, max_num_seqs=4, max_batched_tokens=4, l1_tokens=19)
    assert found.decode == [
        Decode(batch=1, context_tokens=5, tokens_per_s=BUSY.decode_tokens_per_s(1, 5)),
        Decode(batch=4, context_tokens=5, tokens_per_s=None),
    ]
    assert [p.prompt_tokens for p in found.prefill] == [5]
    assert found.prefill[0].tokens_per_s == 5 / BUSY.prefill_seconds(5, 4)
    assert found.restore_s == BUSY.restore_seconds(1000)
    assert found.compute_s == BUSY.prefill_seconds(1000, 4)
