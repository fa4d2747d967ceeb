"""`jkv cluster ...` and `jkv route ...`: what a router knows, and what it would do."""

from __future__ import annotations

import argparse
from typing import Any

from jkv.api import jkv_pb2 as pb
from jkv.api import jkv_pb2_grpc as pb_grpc
from jkv.client import router_show, show
from jkv.client.args import Connection
from jkv.client.prefix import prefix_of
from jkv.client.rpc import connect


def run_cluster(args: argparse.Namespace, connection: Connection) -> int:
    """`jkv cluster status`, the only command."""
    document = router_show.status_document(_call(connection, "Status", pb.RouterStatusRequest()))
    return _print(connection, document, router_show.status_lines(document))


def run_route(args: argparse.Namespace, connection: Connection) -> int:
    """`jkv route explain`, the only command."""
    request = pb.ExplainRequest(prefix=prefix_of(args, args.route_command))
    document = router_show.explain_document(_call(connection, "Explain", request))
    return _print(connection, document, router_show.explain_lines(document))


def _call(connection: Connection, method: str, request: Any) -> Any:
    with connect(connection.address) as channel:
        return getattr(pb_grpc.RouterStub(channel), method)(request, timeout=connection.timeout)


def _print(connection: Connection, document: dict[str, Any], lines: list[str]) -> int:
    if connection.json:
        show.print_json(document)
    else:
        print("\n".join(lines))
    return 0
