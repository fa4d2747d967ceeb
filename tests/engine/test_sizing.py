from __future__ import annotations

import dataclasses
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import pytest

from jkv.config import GIB, ServeConfig
from jkv.engine import host_memory as host_memory_module
from jkv.engine import sizing
from jkv.engine.l1_size import Memory, ProgramBytes, divide, l1_pages
from jkv.engine.programs import Platform, ProgramPlan, programs
from jkv.engine.sizing import device_memory, host_memory
from jkv.errors import ConfigError
from jkv.kernels.gpu_blocks import UNADDRESSABLE
from tests.engine.plans import SMOLLM2, plan_of

_PAGE = 1000
_MEMORY = Memory(available=50_500, default=20_900)


@pytest.mark.parametrize(
    ("flags", "pages"),
    [
        ({}, 20),
        ({"l1_pages": 1}, 1),
        ({"l1_pages": 50}, 50),
        ({"l1_gib": 50_500 / GIB}, 50),
        ({"l1_gib": 1_999 / GIB}, 1),
    ],
)
def test_pages_are_what_the_flags_ask_or_the_default_holds(flags: dict[str, Any], pages: int) -> None:
    assert l1_pages(ServeConfig(**flags), _PAGE, _MEMORY) == pages


@pytest.mark.parametrize(
    ("flags", "memory", "told"),
    [
        (
            {"l1_pages": 51},
            _MEMORY,
            ["--l1-pages 51", "51000 bytes", "50500 bytes available"],
        ),
        ({"l1_gib": 1.0}, _MEMORY, ["--l1-gib 1:", "1073741000 bytes", "50500 bytes available"]),
        ({"l1_gib": 999 / GIB}, _MEMORY, ["--l1-gib", "no page", "1000 bytes", "50500 bytes available"]),
        (
            {},
            Memory(available=999, default=999),
            ["--l1-gib not given", "no page", "999 bytes available"],
        ),
    ],
)
def test_what_does_not_fit_is_refused_with_flag_and_bytes(
    flags: dict[str, Any], memory: Memory, told: list[str]
) -> None:
    with pytest.raises(ConfigError) as refused:
        l1_pages(ServeConfig(**flags), _PAGE, memory)
    assert all(part in str(refused.value) for part in told), str(refused.value)


def test_programs_leave_room_for_one_running_and_for_the_code_of_all() -> None:
    largest = [
        ProgramBytes(temporaries=300, outputs=20, code=7),
        ProgramBytes(temporaries=100, outputs=400, code=5),
    ]
    budget = divide(100_000, 1_000, largest, programs=10)
    assert (budget.reserve, budget.buffers, budget.running, budget.code) == (2_000, 1_000, 500, 70)
    assert budget.left == 98_000 - 1_000 - 500 - 70
    assert divide(1_000, 1_000, largest, programs=10).left == 0


def test_a_device_gives_what_its_allocator_and_the_compiler_leave(
    monkeypatch: pytest.MonkeyPatch, tiny_plan: ProgramPlan
) -> None:
    stats = {"bytes_limit": 10 * GIB, "bytes_in_use": GIB, "peak_bytes_in_use": 2 * GIB}
    _device(monkeypatch, stats)
    memory = device_memory(tiny_plan)
    largest = [p for p in programs(tiny_plan) if p.name in ("step/2", "sample/2")]
    needed = [m.temp_size_in_bytes for m in (p.lower().compile().memory_analysis() for p in largest) if m]
    assert len(needed) == 2
    assert min(needed) > 0
    used = int(9 * GIB * 0.98) - memory.available
    assert used >= max(needed) + sizing.state_bytes(tiny_plan) + sizing.staging_bytes(tiny_plan)
    # Weights are in `bytes_in_use` and the pool is what is being sized: neither counts twice.
    assert used < 16 * 2**20
    assert memory.default == memory.available


@pytest.mark.parametrize(
    ("left_gib", "values_gib"), [(1.9, 1.9 * 16 / 17), (3.0, 2.0), (4.1, 2.0), (4.5, 4.5 * 16 / 17)]
)
def test_a_gpu_gets_no_int8_pool_that_it_cannot_address(left_gib: float, values_gib: float) -> None:
    """Values take 16 of 17 bytes, and their scales the rest."""
    plan = plan_of(SMOLLM2, dtype="bfloat16", kv_dtype="int8", pages=1, platform="gpu")
    page = plan.pool.device_page_bytes
    pages = l1_pages(ServeConfig(), page, sizing.for_l1(plan, int(left_gib * GIB)))
    values = pages * plan.pool.device_page_values
    assert values not in UNADDRESSABLE
    assert 0 <= values_gib * GIB - values < 2 * page
    with pytest.raises(ConfigError, match=r"^--l1-gib 5: .* bytes available"):
        l1_pages(ServeConfig(l1_gib=5.0), page, sizing.for_l1(plan, int(left_gib * GIB)))


@pytest.mark.parametrize(("kv_dtype", "platform"), [("bfloat16", "gpu"), ("int8", "tpu")])
def test_other_pools_take_what_is_left(kv_dtype: str, platform: Platform) -> None:
    plan = plan_of(SMOLLM2, dtype="bfloat16", kv_dtype=kv_dtype, pages=1, platform=platform)
    assert sizing.for_l1(plan, 3 * GIB) == Memory(available=3 * GIB, default=3 * GIB)


@pytest.mark.parametrize("stats", [None, {}])
def test_a_device_that_does_not_tell_its_memory_is_refused(
    monkeypatch: pytest.MonkeyPatch, tiny_plan: ProgramPlan, stats: dict[str, int] | None
) -> None:
    _device(monkeypatch, stats)
    with pytest.raises(ConfigError, match="--l1-gib: cpu devices do not tell"):
        device_memory(tiny_plan)


def test_the_host_gives_a_gib_unless_it_has_less(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    meminfo = tmp_path / "meminfo"
    monkeypatch.setattr(host_memory_module, "_MEMINFO", meminfo)
    alone = ServeConfig(l2_gib=0)
    meminfo.write_text("MemTotal:       24 kB\nMemAvailable:   17 kB\nHugePages_Total:       0\n")
    assert host_memory(alone) == _host(17 * 1024, 17 * 1024)
    meminfo.write_text(f"MemAvailable: {3 * 2**20} kB\n")
    assert host_memory(alone) == _host(3 * GIB, GIB)
    monkeypatch.setattr(host_memory_module, "_MEMINFO", tmp_path / "none")
    monkeypatch.setattr(
        host_memory_module.os, "sysconf", {"SC_PAGE_SIZE": 4096, "SC_PHYS_PAGES": 10}.__getitem__
    )
    assert host_memory(alone) == _host(40960, 40960)


@pytest.mark.parametrize(
    ("l1_gib", "l2_gib", "told"),
    [
        (10.0, 12.0, r"^--l1-gib 10: .* 9663676416 bytes available on the host beside --l2-gib 12$"),
        (10.0, 22.0, r"^--l2-gib 22: that is 23622320128 bytes; 22548578304 bytes available on the host$"),
        (22.0, 0.0, r"^--l1-gib 22: .* 22548578304 bytes available on the host$"),
    ],
)
def test_l1_and_l2_must_fit_the_host_together(
    monkeypatch: pytest.MonkeyPatch, tiny_plan: ProgramPlan, l1_gib: float, l2_gib: float, told: str
) -> None:
    for module in (sizing, host_memory_module):
        monkeypatch.setattr(module, "host_available", lambda: 21 * GIB)
    with pytest.raises(ConfigError, match=told):
        sizing.plan_l1(ServeConfig(l1_gib=l1_gib, l2_gib=l2_gib), tiny_plan)


def test_l1_takes_by_default_what_l2_leaves(monkeypatch: pytest.MonkeyPatch, tiny_plan: ProgramPlan) -> None:
    for module in (sizing, host_memory_module):
        monkeypatch.setattr(module, "host_available", lambda: 21 * GIB)
    pages = sizing.plan_l1(ServeConfig(l2_gib=20.75), tiny_plan)
    assert pages == GIB // 4 // tiny_plan.pool.page_bytes
    assert sizing.plan_l1(ServeConfig(l1_gib=9.0, l2_gib=12.0), tiny_plan)


def _host(available: int, default: int) -> Memory:
    return Memory(available=available, default=default, where="on the host")


def test_sampler_state_counts_every_slot_of_the_vocabulary(tiny_plan: ProgramPlan) -> None:
    slots, vocab = tiny_plan.max_num_seqs, tiny_plan.config.vocab_size
    assert sizing.state_bytes(tiny_plan) == slots * 4 + slots * vocab * (4 + 1 + 4)


@pytest.fixture
def tiny_plan() -> ProgramPlan:
    config = dataclasses.replace(
        SMOLLM2, vocab_size=512, hidden_size=64, intermediate_size=96, num_layers=2, windows=(None, None)
    )
    return plan_of(config, dtype="float32", pages=1, max_num_seqs=2, max_batched_tokens=2)


def _device(monkeypatch: pytest.MonkeyPatch, stats: dict[str, int] | None) -> None:
    monkeypatch.setattr(jax, "local_devices", lambda: [SimpleNamespace(memory_stats=lambda: stats)])
