"""From a configuration to a warm engine: weights, programs, pool and thread."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, cast, get_args

import jax

from jkv.cache.events import ChangeLog
from jkv.cache.keys import ModelIdentity
from jkv.cache.l1 import L1Pool
from jkv.cache.l3.format import StoreIdentity
from jkv.config import GIB, ServeConfig
from jkv.engine.engine import Engine
from jkv.engine.loop import EngineLoop, Inbox
from jkv.engine.planning import (
    compute_dtype,
    has_panels,
    kv_dtype,
    max_model_len,
    numerics,
    plan_for,
    with_pages,
)
from jkv.engine.processes import (
    RESET,
    STOP,
    Follower,
    Leader,
    host_inputs,
    join,
    least,
    shared_devices,
    unpack,
)
from jkv.engine.programs import Platform, Program, ProgramPlan, programs
from jkv.engine.replica import EngineReplica
from jkv.engine.request import EngineInfo
from jkv.engine.runner import Runner
from jkv.engine.scheduler import Limits, Scheduler
from jkv.engine.sizing import plan_l1
from jkv.engine.tiers import build_lower
from jkv.errors import ConfigError
from jkv.kernels.xla_attention import BATCH_INVARIANT_CPU_OPTIONS, CPU_OPTIONS
from jkv.models.params import Params, load_params
from jkv.models.resolve import Checkpoint, ModelFiles, cached_orbax, open_checkpoint, resolve_model
from jkv.paths import cache_dir
from jkv.text.chat import ChatTemplate
from jkv.text.tokenizer import Tokenizer

_COMPILE_THREADS = 2

Progress = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class BuiltEngine:
    """Everything a server needs. `tokenizer` is None for a checkpoint that has none."""

    engine: Engine
    tokenizer: Tokenizer | None
    chat_template: ChatTemplate | None
    served_name: str


def build_engine(config: ServeConfig, progress: Progress) -> BuiltEngine:
    """Loads the model, compiles every program and starts the engine's thread.

    Raises:
        ConfigError: a flag that does not fit the model or the machine.
        UnsupportedModelError: a checkpoint that jkv does not implement.
    """
    use_compilation_cache()
    join(config)
    files = _files(config)
    checkpoint = open_checkpoint(files)
    tokenizer = Tokenizer.load(files.tokenizer) if files.tokenizer is not None else None
    name = config.served_model_name or files.name
    engine = build_from_checkpoint(config, checkpoint, name, progress)
    template = None
    if tokenizer is not None and tokenizer.chat_template is not None:
        template = ChatTemplate(tokenizer.chat_template, tokenizer.bos_token, tokenizer.eos_token)
    return BuiltEngine(engine=engine, tokenizer=tokenizer, chat_template=template, served_name=name)


def build_from_checkpoint(
    config: ServeConfig, checkpoint: Checkpoint, name: str, progress: Progress
) -> Engine:
    """The engine alone, for a checkpoint that is already open."""
    model, platform = checkpoint.config, _platform()
    plan, params, compiled = _load(config, checkpoint, progress)
    tell = Leader.of(config).tell if config.num_processes > 1 else None
    runner = Runner(plan, params, compiled, config.seed, tell)
    runner.warm_up()
    identity = ModelIdentity(
        weights_fingerprint=checkpoint.source.fingerprint(),
        model_config=json.dumps(dataclasses.asdict(model), sort_keys=True),
        compute_dtype=compute_dtype(config, platform),
        kv_dtype=kv_dtype(config, platform),
        page_size=config.page_size,
        page_layout="head,layer,token,2*dim",
        numerics=numerics(config),
    )
    pages = StoreIdentity(
        model_root=identity.root(),
        kv_dtype=kv_dtype(config, platform),
        page_shape=plan.pool.page_shape,
        page_bytes=runner.page_bytes,
        page_size=config.page_size,
    )
    info = EngineInfo(
        model=name,
        vocab_size=model.vocab_size,
        max_model_len=max_model_len(config, model),
        page_size=config.page_size,
        l1_pages=plan.pool.pages,
        eos_token_ids=frozenset(model.eos_token_ids),
    )
    changes = ChangeLog()
    loop = _build_loop(config, runner, pages, changes, info.eos_token_ids)
    replica = EngineReplica(loop, changes, runner, pages, instance_id=config.instance_id, model=name)
    engine = Engine(info, loop, replica)
    engine.start()
    return engine


def follow(config: ServeConfig, progress: Progress) -> None:
    """What a process other than the first does: the same programs on its own devices, until the first ends,
    whatever signals come: that one may have requests to finish.

    Raises:
        ConfigError: a flag that does not fit the model or the machine.
        UnsupportedModelError: a checkpoint that jkv does not implement.
        EngineFailedError: the first process is gone.
    """
    use_compilation_cache()
    join(config)
    plan, params, compiled = _load(config, open_checkpoint(_files(config)), progress)
    follower, inputs = Follower.of(config), {p.name: host_inputs(p) for p in programs(plan)}
    runner = Runner(plan, params, compiled, config.seed)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
    while True:
        name, data = follower.next()
        if name == STOP:
            return
        if name == RESET:
            runner.reset()
        else:
            runner.replay(name, unpack(data, inputs[name]))


def _files(config: ServeConfig) -> ModelFiles:
    """The model in the form that is loaded."""
    return cached_orbax(resolve_model(config.model), codes=has_panels(config, _platform()))


def _load(
    config: ServeConfig, checkpoint: Checkpoint, progress: Progress
) -> tuple[ProgramPlan, Params, Mapping[str, Callable[..., Any]]]:
    """A model's weights and programs, and the plan that they are for."""
    plan = plan_for(config, checkpoint.config, _platform(), shared_devices(config), checkpoint.source)
    started = time.monotonic()
    params = load_params(
        checkpoint.config,
        checkpoint.source,
        plan.dtype,
        stacked=not plan.unroll_layers,
        workers=config.load_workers,
        mesh=plan.mesh,
        whole_experts=plan.whole_experts,
        panels=plan.panels,
        progress=lambda done: progress(f"loading weights {done:.0%}"),
    )
    progress(f"loaded weights in {time.monotonic() - started:.1f} s")
    plan = with_pages(plan, least(plan_l1(config, plan), config))
    l1_gib = plan.pool.pages * plan.pool.device_page_bytes / GIB
    where = "" if config.tp == 1 else f" on each of {config.tp} devices"
    progress(f"L1 has {plan.pool.pages} pages of {config.page_size} tokens, {l1_gib:.2f} GiB{where}")
    return plan, params, compile_programs(plan, progress)


def _build_loop(
    config: ServeConfig, runner: Runner, identity: StoreIdentity, changes: ChangeLog, eos: frozenset[int]
) -> EngineLoop:
    """The engine's thread with its scheduler and tiers, not started."""
    plan, inbox = runner.plan, Inbox()
    pool = L1Pool(plan.pool.pages, config.page_size, changes)
    lower = build_lower(config, pool, runner, identity, inbox.put, changes)
    limits = Limits(
        max_num_seqs=plan.max_num_seqs,
        max_batched_tokens=plan.max_batched_tokens,
        max_mixed_tokens=config.max_mixed_tokens,
    )
    return EngineLoop(
        Scheduler(pool, limits, lower),
        runner,
        inbox,
        model_root=identity.model_root,
        eos=eos,
        max_queue=config.max_queue,
        write_out_s=config.drain_timeout,
    )


def use_compilation_cache() -> None:
    """Keeps compiled programs on disk, so that only the first start compiles: where JAX_COMPILATION_CACHE_DIR
    says, else in jkv's cache.
    """
    if not os.environ.get("JAX_COMPILATION_CACHE_DIR"):
        jax.config.update("jax_compilation_cache_dir", str(cache_dir() / "xla"))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


def compile_programs(plan: ProgramPlan, progress: Progress) -> dict[str, Callable[..., Any]]:
    """Compiles every program of the plan, or reads it from the persistent cache."""
    todo, options = list(programs(plan)), _compiler_options(plan)
    progress(f"compiling {len(todo)} programs: minutes at a first start, seconds at later ones")
    started = time.monotonic()
    compiled: dict[str, Callable[..., Any]] = {}
    with ThreadPoolExecutor(_COMPILE_THREADS) as pool:

        def build(program: Program) -> None:
            compiled[program.name] = program.lower().compile(options)
            progress(f"compiled {len(compiled)}/{len(todo)}: {program.name}")

        list(pool.map(build, todo))
    progress(f"compiled {len(todo)} programs in {time.monotonic() - started:.1f} s")
    return compiled


def _compiler_options(plan: ProgramPlan) -> dict[str, str | bool]:
    if plan.platform != "cpu":
        return {}
    return BATCH_INVARIANT_CPU_OPTIONS if plan.batch_invariant else CPU_OPTIONS


def _platform() -> Platform:
    backend = jax.default_backend()
    if backend not in get_args(Platform):
        raise ConfigError(f"jax runs on {backend!r}; supported: {', '.join(get_args(Platform))}")
    return cast(Platform, backend)
