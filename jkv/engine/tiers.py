"""From a configuration to the tiers below L1."""

from __future__ import annotations

import logging
import shutil
import time
from collections.abc import Callable
from pathlib import Path

from jkv.cache.disk_tier import DiskTier
from jkv.cache.events import ChangeLog
from jkv.cache.gate import CostGate
from jkv.cache.host_tier import HostTier
from jkv.cache.l1 import L1Pool
from jkv.cache.l3.format import StoreIdentity
from jkv.cache.l3.store import PageStore, StoreOptions
from jkv.cache.lookup import Policy
from jkv.cache.lower import LowerTiers
from jkv.config import ServeConfig
from jkv.engine.runner import Runner
from jkv.errors import ConfigError

_log = logging.getLogger(__name__)

# Without L2, pages on their way to and from L3 are staged in host memory.
_STAGING_BYTES = 128 * 2**20
_STAGING_PAGES = 16

Post = Callable[[Callable[[], None]], None]


def host_page_count(config: ServeConfig, page_bytes: int) -> int:
    """How many pages of host memory L2, or in its stead the staging of L3, may take.

    Raises:
        ConfigError: L2 would hold no page.
    """
    if not config.l2_bytes:
        return 0 if config.l3_dir is None else max(_STAGING_PAGES, _STAGING_BYTES // page_bytes)
    pages = config.l2_bytes // page_bytes
    if not pages:
        raise ConfigError(
            f"--l2-gib {config.l2_gib:g}: {config.l2_bytes} bytes hold no page, for one takes {page_bytes}"
        )
    return pages


def build_lower(
    config: ServeConfig,
    pool: L1Pool,
    runner: Runner,
    identity: StoreIdentity,
    post: Post,
    changes: ChangeLog,
) -> LowerTiers:
    """L2 and L3 as the flags ask.

    Raises:
        ConfigError: a size that does not fit, or a store that cannot be used.
    """
    return LowerTiers(
        pool,
        HostTier(host_page_count(config, runner.host_page_bytes), keep=config.l2_bytes > 0, changes=changes),
        None if config.l3_dir is None else _open_disk(config, config.l3_dir, runner, identity, post, changes),
        gate=CostGate(page_size=config.page_size, clock=time.monotonic),
        policy=Policy(
            write=config.write_policy,
            load=config.load_policy,
            load_timeout_s=config.load_timeout,
            l3_min_tokens=config.l3_min_tokens,
            l3_admission=config.l3_admission,
        ),
        post=post,
    )


def _open_disk(
    config: ServeConfig,
    location: str,
    runner: Runner,
    identity: StoreIdentity,
    post: Post,
    changes: ChangeLog,
) -> DiskTier:
    started = time.monotonic()
    options = StoreOptions(
        location=location,
        owner=config.l3_owner,
        sync=config.l3_sync,
        write_bytes_per_s=config.l3_write_bytes_per_s,
        daily_write_bytes=config.l3_daily_write_bytes,
    )
    store = PageStore.open(options, identity)
    try:
        disk = DiskTier(store, store.list(), config.l3_bytes, runner, post, changes, store.place)
        _check_room(config, location, disk)
    except BaseException:
        store.close()
        raise
    store.watch(lambda pages: post(lambda: disk.set_foreign(pages)))
    _log.info(
        "L3 in %s under owner %s: %d pages of its own, %d of others, listed in %.2f s",
        location,
        store.owner,
        len(disk),
        disk.foreign,
        time.monotonic() - started,
    )
    return disk


def _check_room(config: ServeConfig, location: str, disk: DiskTier) -> None:
    """Raises ConfigError where L3 could not grow to its size, or would hold nothing."""
    if not disk.capacity:
        least = disk.store.overhead_bytes + disk.store.page_cost
        raise ConfigError(f"--l3-gib {config.l3_gib:g}: holds no page; the smallest is {least} bytes")
    directory = Path(location.removeprefix("file://"))
    if not directory.is_dir():
        return  # an object store, which does not tell
    available = shutil.disk_usage(directory).free + disk.bytes
    if config.l3_bytes > available:
        raise ConfigError(
            f"--l3-gib {config.l3_gib:g}: {config.l3_bytes} bytes; {available} bytes available in "
            f"{location}, with what this server already has there"
        )
