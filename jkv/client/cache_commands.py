"""`jkv cache ...`: one function for each command, from arguments to a call and its answer."""

from __future__ import annotations

import argparse
from typing import Any

from jkv import flags
from jkv.api import jkv_pb2 as pb
from jkv.api import jkv_pb2_grpc as pb_grpc
from jkv.client import cache_show, inputs, show
from jkv.client.args import Connection, Pin
from jkv.client.cache_show import pages
from jkv.client.prefix import prefix_of
from jkv.client.rpc import connect
from jkv.errors import ConfigError


def run_cache(args: argparse.Namespace, connection: Connection) -> int:
    return _COMMANDS[args.cache_command](args, connection)


def _stats(args: argparse.Namespace, connection: Connection) -> int:
    answer = _call(connection, "Stats", pb.CacheStatsRequest())
    document = cache_show.stats_document(answer)
    return _print(connection, document, "\n".join(cache_show.stats_lines(document)))


def _lookup(args: argparse.Namespace, connection: Connection) -> int:
    answer = _call(connection, "Lookup", pb.LookupRequest(prefix=prefix_of(args, args.cache_command)))
    document = cache_show.lookup_document(answer)
    return _print(connection, document, cache_show.lookup_line(document))


def _pin(args: argparse.Namespace, connection: Connection) -> int:
    ttl = Pin(**flags.given(Pin, args)).ttl
    answer = _call(connection, "Pin", pb.PinRequest(prefix=prefix_of(args, args.cache_command), ttl_s=ttl))
    return _print(connection, {"pages": answer.pages}, f"pinned {pages(answer.pages)}")


def _unpin(args: argparse.Namespace, connection: Connection) -> int:
    answer = _call(connection, "Unpin", pb.UnpinRequest(prefix=prefix_of(args, args.cache_command)))
    return _print(connection, {"pages": answer.pages}, f"unpinned {pages(answer.pages)}")


def _prefetch(args: argparse.Namespace, connection: Connection) -> int:
    answer = _call(
        connection, "Prefetch", pb.PrefetchRequest(prefix=prefix_of(args, args.cache_command), tier=args.tier)
    )
    return _print(connection, {"tokens": answer.tokens}, f"{answer.tokens} tokens are in {args.tier}")


def _demote(args: argparse.Namespace, connection: Connection) -> int:
    answer = _call(connection, "Demote", pb.DemoteRequest(tier=args.tier))
    return _print(connection, {"pages": answer.pages}, f"{pages(answer.pages)} left {args.tier}")


def _flush(args: argparse.Namespace, connection: Connection) -> int:
    dropped = dict(_call(connection, "Flush", pb.FlushRequest(tiers=args.tiers)).pages)
    text = ", ".join(f"{pages(count)} of {tier}" for tier, count in sorted(dropped.items()))
    return _print(connection, {"pages": dropped}, f"dropped {text}")


def _drain(args: argparse.Namespace, connection: Connection) -> int:
    _call(connection, "Drain", pb.DrainRequest())
    return _print(connection, {}, "all writes are done")


def _evict(args: argparse.Namespace, connection: Connection) -> int:
    if (args.prompt, args.token_ids, args.messages) != (None, None, None):
        request = pb.EvictRequest(prefix=prefix_of(args, args.cache_command))
    elif args.salt is not None:
        request = pb.EvictRequest(cache_salt=inputs.text("--salt", args.salt))
    else:
        raise ConfigError("evict: give a prefix, or --salt alone for all pages of a salt")
    answer = _call(connection, "Evict", request)
    return _print(connection, {"pages": answer.pages}, f"evicted {pages(answer.pages)}")


_COMMANDS = {
    "stats": _stats,
    "lookup": _lookup,
    "pin": _pin,
    "unpin": _unpin,
    "prefetch": _prefetch,
    "demote": _demote,
    "flush": _flush,
    "drain": _drain,
    "evict": _evict,
}


def _call(connection: Connection, method: str, request: Any) -> Any:
    with connect(connection.address) as channel:
        return getattr(pb_grpc.CacheStub(channel), method)(request, timeout=connection.timeout)


def _print(connection: Connection, document: dict[str, Any], text: str) -> int:
    if connection.json:
        show.print_json(document)
    else:
        print(text)
    return 0
