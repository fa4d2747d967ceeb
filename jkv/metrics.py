"""/metrics over HTTP in Prometheus' text format. Nothing is counted here: a scrape reads what is counted
anyway.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Iterator, Mapping, Sequence

from prometheus_client import CollectorRegistry, ProcessCollector, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from jkv.errors import ConfigError
from jkv.server_config import ServerConfig

log = logging.getLogger(__name__)

# By then Prometheus has given a scrape up.
_TIMEOUT_S = 10.0

Read = Callable[[], Awaitable[Iterable[Metric]]]
Values = float | Mapping[tuple[str, ...], float]


def gauge(name: str, meaning: str, values: Values, labels: Sequence[str] = ()) -> Metric:
    """What goes up and down. `values` are by their labels' values, or one without labels."""
    return _filled(GaugeMetricFamily(name, meaning, labels=labels), values)


def counter(name: str, meaning: str, values: Values, labels: Sequence[str] = ()) -> Metric:
    """What only grows; the format adds `_total` to the name. `values` as in `gauge`."""
    return _filled(CounterMetricFamily(name, meaning, labels=labels), values)


@contextlib.asynccontextmanager
async def exporting(config: ServerConfig, read: Read) -> AsyncGenerator[None, None]:
    """Offers what `read` gives, and what the system counts of this process, if the flags say so.

    `read` is called on this event loop, at each scrape.

    Raises:
        ConfigError: the port cannot be used.
    """
    if config.metrics_port is None:
        yield
        return
    registry = CollectorRegistry()
    ProcessCollector(registry=registry)
    registry.register(_OnLoop(asyncio.get_running_loop(), read))
    try:
        server, _ = start_http_server(config.metrics_port, config.host, registry)
    except OSError as error:
        raise ConfigError(
            f"--metrics-port {config.metrics_port}: cannot listen on {config.host}: "
            f"{error.strerror or error}; 0 picks a free port"
        ) from None
    log.info("metrics at http://%s:%d/metrics", config.host, server.server_port)
    try:
        yield
    finally:
        await asyncio.to_thread(server.shutdown)
        server.server_close()


class _OnLoop(Collector):
    """Asks the event loop, which owns what is read. Called on the HTTP server's threads."""

    def __init__(self, loop: asyncio.AbstractEventLoop, read: Read) -> None:
        self._loop, self._read = loop, read

    def describe(self) -> Iterable[Metric]:
        """None: else registering would collect them, on the very loop that waits for it."""
        return ()

    def collect(self) -> Iterator[Metric]:
        async def read() -> Iterable[Metric]:
            return await self._read()

        yield from asyncio.run_coroutine_threadsafe(read(), self._loop).result(_TIMEOUT_S)


def _filled(family: GaugeMetricFamily | CounterMetricFamily, values: Values) -> Metric:
    for labels, value in values.items() if isinstance(values, Mapping) else (((), values),):
        family.add_metric(labels, value)
    return family
