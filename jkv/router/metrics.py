"""A router's metrics, from what its parts count."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from prometheus_client.core import Metric

from jkv.cache.breaker import BreakerState
from jkv.metrics import counter, gauge
from jkv.router.engines import Engine, EngineState
from jkv.router.fleet import Fleet
from jkv.router.membership import Membership
from jkv.router.proxy import Proxy, Stage
from jkv.router.tokens import TokenCache
from jkv.router.view import View

_ENGINE = ("engine",)


class RouterMetrics:
    """Owner: the event loop."""

    def __init__(
        self, fleet: Fleet, view: View, proxy: Proxy, tokens: TokenCache, membership: Membership
    ) -> None:
        self._fleet, self._view, self._proxy = fleet, view, proxy
        self._tokens, self._membership = tokens, membership

    async def read(self) -> list[Metric]:
        engines = [engine for engine in self._fleet.engines if not engine.refused]
        return [
            *self._router(),
            *self._requests(engines),
            *self._index(engines),
            *_states(engines),
            *_self_tests(engines),
        ]

    def _router(self) -> Iterator[Metric]:
        members = self._membership
        refused = len(members.refused) + sum(bool(engine.refused) for engine in self._fleet.engines)
        yield gauge("jkv_serving", "1 while there is an engine to send requests to", self._fleet.is_serving)
        yield gauge("jkv_router_members", "engines in the cluster", len(members.members))
        yield gauge("jkv_router_refused_members", "engines that may not join it", refused)
        yield gauge(
            "jkv_router_membership_frozen",
            "1 while etcd cannot be followed and the last view is used",
            not members.state.current,
        )
        yield gauge("jkv_router_token_cache_bytes", "memory of known texts' token ids", self._tokens.nbytes)
        yield counter("jkv_router_token_cache_hits", "texts whose ids were known", self._tokens.hits)
        yield counter(
            "jkv_router_token_cache_misses", "texts that an engine was asked for", self._tokens.misses
        )

    def _requests(self, engines: Sequence[Engine]) -> Iterator[Metric]:
        yield gauge("jkv_requests_running", "requests in flight", self._proxy.running)
        retries = {(stage.value,): self._proxy.retries[stage] for stage in Stage}
        yield counter(
            "jkv_router_retries",
            "requests that went on elsewhere after their engine failed, by how far they were",
            retries,
            ("stage",),
        )
        decisions = _each(engines, lambda engine: engine.loads.sent)
        yield counter("jkv_router_decisions", "requests sent to an engine", decisions, _ENGINE)
        failures = {(one.id, kind): count for one in engines for kind, count in one.failures.items()}
        yield counter(
            "jkv_router_failures", "requests that an engine failed, by kind", failures, ("engine", "kind")
        )
        in_flight = _each(engines, lambda engine: len(engine.sent))
        yield gauge("jkv_router_in_flight", "requests that an engine has of this router", in_flight, _ENGINE)

    def _index(self, engines: Sequence[Engine]) -> Iterator[Metric]:
        yield gauge("jkv_router_index_pages", "different pages in the index", self._view.pages)
        yield gauge("jkv_router_index_bytes", "memory of the index", self._view.nbytes)
        pages = {
            (engine.id, tier): pages
            for engine in engines
            for tier, pages in self._view.pages_by_tier(engine).items()
        }
        yield gauge(
            "jkv_router_engine_pages", "pages that an engine is believed to hold", pages, ("engine", "tier")
        )
        lag = _each(engines, lambda engine: engine.lag_s)
        yield gauge("jkv_router_index_lag_seconds", "since an engine's last event", lag, _ENGINE)


def _states(engines: Sequence[Engine]) -> Iterator[Metric]:
    states = {(one.id, state.value): one.state is state for one in engines for state in EngineState}
    yield gauge(
        "jkv_router_engine_state", "1 for the state that an engine is in", states, ("engine", "state")
    )
    breakers = {(one.id, s.value): one.breaker.state is s for one in engines for s in BreakerState}
    yield gauge("jkv_router_breaker", "1 for the state of an engine's breaker", breakers, ("engine", "state"))


def _self_tests(engines: Sequence[Engine]) -> Iterator[Metric]:
    """Of engines whose test has ended."""
    tested = [engine for engine in engines if engine.self_test.verdict != "pending"]
    passed = _each(tested, lambda engine: engine.self_test.verdict == "passed")
    yield gauge("jkv_router_self_test_passed", "whether an engine's self-test passed", passed, _ENGINE)
    predicted = _each(tested, lambda engine: engine.self_test.predicted_tokens)
    yield gauge(
        "jkv_router_self_test_predicted_tokens", "tokens that the index had of its prompt", predicted, _ENGINE
    )
    cached = _each(tested, lambda engine: engine.self_test.cached_tokens)
    yield gauge("jkv_router_self_test_cached_tokens", "tokens that the engine had cached", cached, _ENGINE)


def _each(engines: Sequence[Engine], value: Callable[[Engine], float]) -> dict[tuple[str, ...], float]:
    return {(engine.id,): value(engine) for engine in engines}
