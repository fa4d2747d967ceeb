"""The Router service: a router's view of its cluster, for people and tests."""

from __future__ import annotations

from jkv.api import jkv_pb2 as pb
from jkv.api import jkv_pb2_grpc as pb_grpc
from jkv.api.serving import Context, answering
from jkv.api.validate import check_cache_salt
from jkv.errors import InvalidRequestError
from jkv.router.config import RouterConfig
from jkv.router.engines import Engine
from jkv.router.failures import UpstreamError
from jkv.router.fleet import Fleet
from jkv.router.membership import Membership
from jkv.router.shard_counts import ShardCounts
from jkv.router.texts import Texts
from jkv.router.view import View


class RouterServicer(pb_grpc.RouterServicer):
    """Answers at any time, also without engines."""

    def __init__(
        self,
        config: RouterConfig,
        fleet: Fleet,
        view: View,
        texts: Texts,
        membership: Membership,
        shards: ShardCounts | None,
    ) -> None:
        self._config, self._fleet, self._view = config, fleet, view
        self._texts, self._membership, self._shards = texts, membership, shards

    @answering
    async def Status(self, request: pb.RouterStatusRequest, context: Context) -> pb.RouterStatusResponse:
        refused = [
            pb.RefusedEngine(id=one.id, address=one.address, reason=one.refused)
            for one in self._membership.refused.values()
        ]
        refused += [
            pb.RefusedEngine(id=engine.id, address=engine.address, reason=engine.refused)
            for engine in self._fleet.engines
            if engine.refused
        ]
        return pb.RouterStatusResponse(
            cluster=self._config.cluster,
            policy=self._config.policy,
            engines=[self._engine(engine) for engine in self._fleet.engines if not engine.refused],
            refused=refused,
            index_pages=self._view.pages,
            index_bytes=self._view.nbytes,
            membership=self._membership_text(),
        )

    @answering
    async def Explain(self, request: pb.ExplainRequest, context: Context) -> pb.ExplainResponse:
        prefix = request.prefix
        check_cache_salt(prefix.cache_salt, "prefix.cache_salt")
        try:
            ids = await self._texts.token_ids(prefix)
        except InvalidRequestError as error:
            raise InvalidRequestError(f"prefix.{error.field}", error.reason) from None
        except UpstreamError as error:
            return await context.abort(error.status.code, error.status.details, error.status.metadata)
        engines = self._fleet.candidates(prefix.model)
        return self._view.explain(engines, ids, prefix.cache_salt)

    @answering
    async def Digest(self, request: pb.RouterDigestRequest, context: Context) -> pb.DigestResponse:
        for engine in self._fleet.engines:
            if engine.id == request.engine:
                return pb.DigestResponse(
                    incarnation=engine.incarnation, number=engine.number, tiers=self._view.digest(engine)
                )
        known = ", ".join(engine.id for engine in self._fleet.engines) or "none"
        raise InvalidRequestError("engine", f"{request.engine!r} is not known; the engines are {known}")

    def _engine(self, engine: Engine) -> pb.EngineStatus:
        return pb.EngineStatus(
            id=engine.id,
            address=engine.address,
            incarnation=engine.incarnation,
            model=engine.model,
            state=engine.state.value,
            load=engine.load,
            pages=self._view.pages_by_tier(engine),
            lag_s=engine.lag_s,
            in_flight=len(engine.sent),
            self_test=engine.self_test.verdict,
            shards=0 if self._shards is None else self._shards.of(engine.id),
        )

    def _membership_text(self) -> str:
        state = self._membership.state
        if self._config.etcd is None:
            return "static"
        return "etcd" if state.current else f"frozen: {state.reason}"
