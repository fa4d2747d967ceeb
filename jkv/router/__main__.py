"""`python -m jkv.router`: the front door of a cluster, from flags to a clean exit."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import sys
from collections.abc import Sequence

from jkv.api.listening import join_address
from jkv.errors import ConfigError, JkvError
from jkv.metrics import exporting
from jkv.process import announce, stop_on_signals, unless
from jkv.router.config import RouterConfig, parse_config
from jkv.router.etcd import Etcd, etcd_options
from jkv.router.membership import Members, StaticMembers
from jkv.router.server import Router

log = logging.getLogger("jkv.router")


def main(argv: Sequence[str] | None = None) -> int:
    """Route until SIGTERM or SIGINT. Returns 0, 1 after a failure, 2 for unusable flags."""
    try:
        config = parse_config(argv)
        logging.basicConfig(format="%(asctime)s router %(levelname)s %(name)s: %(message)s")
        logging.getLogger("jkv").setLevel(config.log_level.upper())
        asyncio.run(route(config))
    except JkvError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2 if isinstance(error, ConfigError) else 1
    return 0


async def route(config: RouterConfig) -> None:
    """Listen, follow the cluster and route; drain on the first SIGTERM or SIGINT, exit at once on a second.

    Raises:
        ConfigError: the address cannot be used, or a file of the flags.
    """
    stopping = stop_on_signals()
    async with contextlib.AsyncExitStack() as stack:
        router = _router(config, stack)
        await stack.enter_async_context(exporting(config, router.metrics.read))
        address = join_address(config.host, await router.start(config.host, config.grpc_port))
        announce(f"listening on {address}, waiting for engines")
        try:
            # Neither gives a result: which came first shows in the event.
            await unless(stopping, asyncio.ensure_future(router.ready()))
            if not stopping.is_set():
                announce(f"ready: {config.cluster} on {address}")
                await unless(stopping, asyncio.ensure_future(router.ended()))
        finally:
            log.info("draining for at most %g s", config.drain_timeout)
            await router.stop(config.drain_timeout)


def _router(config: RouterConfig, stack: contextlib.AsyncExitStack) -> Router:
    """Closes its connection to etcd with the stack."""
    options = etcd_options(config)
    if options is None:
        return Router(config, StaticMembers(config.engine_addresses))
    etcd = Etcd(options)
    stack.push_async_callback(etcd.close)
    return Router(config, Members(etcd, config.cluster), etcd)


if __name__ == "__main__":
    sys.exit(main())
