"""`python -m jkv.serve`: an engine behind its gRPC server, from flags to a clean exit."""

from __future__ import annotations

import asyncio
import logging
import os
import sys
import threading
from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

from jkv.api.engine_metrics import EngineMetrics
from jkv.api.grpc_server import GrpcServer
from jkv.api.listening import join_address
from jkv.api.prompt import Backend
from jkv.cache.control import CacheControl
from jkv.cache.replica import Replica
from jkv.config import ServeConfig, parse_config
from jkv.engine.gpu_memory import allow_gpu_memory
from jkv.engine.host_memory import keep_freed_memory
from jkv.engine.request import Generator
from jkv.engine.stats import EngineStats
from jkv.errors import ConfigError, EngineFailedError, JkvError
from jkv.member import ClusterMember
from jkv.metrics import exporting
from jkv.process import announce, exit_now, stop_on_signals, unless
from jkv.progress import ProgressLine
from jkv.router.etcd import etcd_options
from jkv.text.chat import ChatTemplate
from jkv.text.tokenizer import Tokenizer

T = TypeVar("T")

log = logging.getLogger("jkv.serve")


class RunningEngine(Generator, Protocol):
    """An engine with a life of its own."""

    @property
    def cache(self) -> CacheControl: ...
    @property
    def replica(self) -> Replica: ...
    @property
    def stats(self) -> EngineStats: ...

    async def drain(self, timeout: float) -> None:
        """Refuse new requests, end once the running ones are done; cancel them after `timeout` seconds."""
        ...

    async def ended(self) -> None:
        """Return when the engine has stopped by itself, which is a failure, or has been drained."""
        ...


class Built(Protocol):
    """A loaded and warm model."""

    @property
    def engine(self) -> RunningEngine: ...
    @property
    def tokenizer(self) -> Tokenizer | None: ...
    @property
    def chat_template(self) -> ChatTemplate | None: ...
    @property
    def served_name(self) -> str: ...


Build = Callable[[ServeConfig, Callable[[str], None]], Built]


def main(argv: Sequence[str] | None = None) -> int:
    """Serve until SIGTERM or SIGINT. Returns 0, 1 where the model cannot be served, 2 for unusable flags."""
    try:
        config = parse_config(argv)
        _set_up_logging(config)
        _prepare_memory()
        from jkv.engine.build import build_engine, follow  # imports jax, which reads the environment once

        if config.process_id:
            follow(config, log.info)
            return 0
        asyncio.run(serve(config, build_engine))
    except JkvError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2 if isinstance(error, ConfigError) else 1
    return 0


async def serve(config: ServeConfig, build: Build) -> None:
    """Listen, load, serve, and drain on the first SIGTERM or SIGINT; a second one exits at once.

    Stopped before the model is ready, the process exits here with status 0: there is nothing to drain, and
    loading cannot be interrupted.

    Raises:
        JkvError: the address or the model cannot be used, or the engine failed for good.
    """
    metrics = EngineMetrics()
    async with exporting(config, metrics.read):
        await _serve(config, build, metrics)


async def _serve(config: ServeConfig, build: Build, metrics: EngineMetrics) -> None:
    stopping = stop_on_signals()
    server = GrpcServer()
    address = join_address(config.host, await server.start(config.host, config.grpc_port))
    announce(f"listening on {address}, loading {config.model}")
    progress = _progress()
    try:
        built = await unless(stopping, _in_daemon_thread(lambda: build(config, progress)))
    except BaseException:
        await server.stop()
        raise
    finally:
        progress.close()
    if built is None:
        await server.stop()
        exit_now(0)
    await server.open(
        Backend(
            generator=built.engine,
            cache=built.engine.cache,
            replica=built.engine.replica,
            served_name=built.served_name,
            tokenizer=built.tokenizer,
            chat_template=built.chat_template,
        )
    )
    metrics.open(built.engine)
    announce(f"ready: {built.served_name} on {address}")
    metrics.member = member = await _join(config, built.engine.replica, address)
    # ended() gives no result, as stopping does not: which came first shows in the event.
    await unless(stopping, asyncio.ensure_future(built.engine.ended()))
    if member is not None:
        await member.leave()
    if not stopping.is_set():
        await server.close()
        await server.stop()
        raise EngineFailedError("the engine cannot go on; the log says why")
    log.info("draining for at most %g s", config.drain_timeout)
    metrics.close()
    await server.close()
    await built.engine.drain(config.drain_timeout)
    if member is not None:
        await member.close()
    await server.stop()


async def _join(config: ServeConfig, replica: Replica, address: str) -> ClusterMember | None:
    """Takes the engine's place in its cluster, where it has one."""
    options = etcd_options(config)
    if options is None:
        return None
    member = ClusterMember(config, options, replica, address)
    await member.join()
    return member


def _set_up_logging(config: ServeConfig) -> None:
    logging.basicConfig(format=f"%(asctime)s {config.instance_id} %(levelname)s %(name)s: %(message)s")
    logging.getLogger("jkv").setLevel(config.log_level.upper())


def _progress() -> ProgressLine:
    if not (log.isEnabledFor(logging.INFO) and sys.stderr.isatty()):
        return ProgressLine(log.info, None)
    progress = ProgressLine(log.info, sys.stderr)
    for handler in logging.getLogger().handlers:
        handler.addFilter(progress.make_room)
    return progress


def _prepare_memory() -> None:
    """Before jax starts."""
    keep_freed_memory()
    allow_gpu_memory(os.environ, os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))


def _in_daemon_thread(function: Callable[[], T]) -> asyncio.Future[T]:
    """Run `function` in a thread that does not keep the process alive, as those of an executor do."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()

    def settle(result: T | None, error: Exception | None) -> None:
        if future.cancelled():
            return
        if error is not None:
            future.set_exception(error)
        else:
            future.set_result(result)  # pyright: ignore[reportArgumentType]

    def run() -> None:
        try:
            result, error = function(), None
        except Exception as raised:
            result, error = None, raised
        loop.call_soon_threadsafe(settle, result, error)

    threading.Thread(target=run, name="load", daemon=True).start()
    return future


if __name__ == "__main__":
    sys.exit(main())
