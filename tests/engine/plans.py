"""Models by their shapes, and plans of the programs that an engine would run them with."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace

from jax.sharding import AbstractMesh, Mesh

from jkv.config import ServeConfig
from jkv.engine.planning import plan_for, with_pages
from jkv.engine.programs import Platform, ProgramPlan
from jkv.kernels.mesh import TP
from jkv.models.config import ExpertsConfig, ModelConfig, RopeConfig

SMOLLM2 = ModelConfig(
    architecture="LlamaForCausalLM",
    vocab_size=49152,
    hidden_size=576,
    intermediate_size=1536,
    num_layers=30,
    num_heads=9,
    num_kv_heads=3,
    head_dim=64,
    max_position=8192,
    rms_norm_eps=1e-5,
    rope=RopeConfig(theta=100_000),
    windows=(None,) * 30,
    tie_embeddings=True,
)

LLAMA3_8B = ModelConfig(
    architecture="LlamaForCausalLM",
    vocab_size=128256,
    hidden_size=4096,
    intermediate_size=14336,
    num_layers=32,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    max_position=8192,
    rms_norm_eps=1e-5,
    rope=RopeConfig(theta=500_000),
    windows=(None,) * 32,
    tie_embeddings=False,
)


QWEN3_1_7B = ModelConfig(
    architecture="Qwen3ForCausalLM",
    vocab_size=151936,
    hidden_size=2048,
    intermediate_size=6144,
    num_layers=28,
    num_heads=16,
    num_kv_heads=8,
    head_dim=128,
    max_position=40960,
    rms_norm_eps=1e-6,
    rope=RopeConfig(theta=1_000_000),
    windows=(None,) * 28,
    tie_embeddings=True,
    qk_norm=True,
)

QWEN3_30B_A3B = dataclasses.replace(
    QWEN3_1_7B,
    architecture="Qwen3MoeForCausalLM",
    intermediate_size=768,
    num_layers=48,
    num_heads=32,
    num_kv_heads=4,
    windows=(None,) * 48,
    tie_embeddings=False,
    experts=ExpertsConfig(count=128, per_token=8, normalized=True),
)

MIXTRAL_8X7B = dataclasses.replace(
    LLAMA3_8B,
    architecture="MixtralForCausalLM",
    vocab_size=32000,
    max_position=32768,
    rope=RopeConfig(theta=1_000_000),
    experts=ExpertsConfig(count=8, per_token=2, normalized=True),
)


def plan_of(
    config: ModelConfig,
    *,
    dtype: str,
    pages: int,
    kv_dtype: str | None = None,
    page_size: int = 64,
    max_num_seqs: int = 16,
    max_batched_tokens: int = 512,
    platform: Platform = "cpu",
    device_kind: str = "TPU v6 lite",
) -> ProgramPlan:
    """The plan that `jkv.engine.build` makes for a platform; `device_kind` is a TPU's, a GPU is an H100."""
    serve = ServeConfig(
        dtype=dtype,
        kv_dtype=kv_dtype or "auto",
        page_size=page_size,
        max_num_seqs=max_num_seqs,
        max_batched_tokens=max_batched_tokens,
        max_mixed_tokens=max_batched_tokens,
    )
    device = SimpleNamespace(
        device_kind=device_kind, core_count=132, shared_memory_per_block_optin=227 * 1024
    )
    return with_pages(plan_for(serve, config, platform, [device]), pages)


def with_layers(config: ModelConfig, layers: int) -> ModelConfig:
    """The same layer, fewer times."""
    return dataclasses.replace(config, num_layers=layers, windows=config.windows[:layers])


def over(plan: ProgramPlan, mesh: Mesh | AbstractMesh) -> ProgramPlan:
    """The same plan for devices that share the model."""
    pool = dataclasses.replace(plan.pool, tp=mesh.size)
    return dataclasses.replace(plan, mesh=mesh, pool=pool, panels=None)


# Of plans for a v5e and for an H100; the others are for a v6e.
V5E, H100 = " on v5e", " on h100"
# Devices that need not be there.
FOUR = AbstractMesh((4,), (TP,))
# Of real depth, for under scan layers cost no time to compile.
PLANS = {
    "smollm2": plan_of(SMOLLM2, dtype="bfloat16", pages=1024, platform="tpu"),
    "smollm2-float32-kv": plan_of(SMOLLM2, dtype="bfloat16", kv_dtype="float32", pages=1024, platform="tpu"),
    "smollm2-int8-kv": plan_of(SMOLLM2, dtype="bfloat16", kv_dtype="int8", pages=1024, platform="tpu"),
    "llama3-8b-int8-kv": plan_of(LLAMA3_8B, dtype="bfloat16", kv_dtype="int8", pages=1024, platform="tpu"),
    "llama3-8b": plan_of(LLAMA3_8B, dtype="bfloat16", pages=1024, platform="tpu"),
    "llama3-8b-tp4": over(plan_of(LLAMA3_8B, dtype="bfloat16", pages=1024, platform="tpu"), FOUR),
    "llama3-8b-tp4" + V5E: over(
        plan_of(LLAMA3_8B, dtype="bfloat16", pages=1024, platform="tpu", device_kind="TPU v5 lite"), FOUR
    ),
    "qwen3-1.7b-tp4": over(plan_of(QWEN3_1_7B, dtype="bfloat16", pages=1024, platform="tpu"), FOUR),
    # With experts the layers are unrolled on TPUs as well.
    "qwen3-30b-a3b, 2 layers": plan_of(
        with_layers(QWEN3_30B_A3B, 2), dtype="bfloat16", pages=1024, platform="tpu"
    ),
    "smollm2" + H100: plan_of(SMOLLM2, dtype="bfloat16", pages=1024, platform="gpu"),
    "smollm2-int8-kv" + H100: plan_of(SMOLLM2, dtype="bfloat16", kv_dtype="int8", pages=1024, platform="gpu"),
    "llama3-8b" + H100: plan_of(LLAMA3_8B, dtype="bfloat16", pages=1024, platform="gpu"),
    "llama3-8b-tp4" + H100: over(plan_of(LLAMA3_8B, dtype="bfloat16", pages=1024, platform="gpu"), FOUR),
    "qwen3-1.7b" + H100: plan_of(QWEN3_1_7B, dtype="bfloat16", pages=1024, platform="gpu"),
    # On GPUs layers are unrolled, and each costs time to compile. Llama 3's and Qwen3's pools have more than
    # 2^31 elements.
    "smollm2-int8-kv, 2 layers" + H100: plan_of(
        with_layers(SMOLLM2, 2), dtype="bfloat16", kv_dtype="int8", pages=4096, platform="gpu"
    ),
    "llama3-8b, 2 layers" + H100: plan_of(
        with_layers(LLAMA3_8B, 2), dtype="bfloat16", pages=8448, platform="gpu"
    ),
    "qwen3-30b-a3b, 2 layers" + H100: plan_of(
        with_layers(QWEN3_30B_A3B, 2), dtype="bfloat16", pages=8448, platform="gpu"
    ),
    # Each device has a quarter of the experts.
    "qwen3-30b-a3b-tp4, 2 layers" + H100: dataclasses.replace(
        over(
            plan_of(with_layers(QWEN3_30B_A3B, 2), dtype="bfloat16", pages=4 * 8448, platform="gpu"),
            FOUR,
        ),
        whole_experts=True,
    ),
    "mixtral-8x7b, 2 layers" + H100: plan_of(
        with_layers(MIXTRAL_8X7B, 2), dtype="bfloat16", pages=8448, platform="gpu"
    ),
    "qwen3-1.7b, 2 layers" + H100: plan_of(
        with_layers(QWEN3_1_7B, 2), dtype="bfloat16", pages=8448, platform="gpu"
    ),
}
