"""The client's entry point: arguments to a command, failures to an exit status."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from jkv import flags
from jkv.client import commands
from jkv.client.args import Connection, RouterConnection, build_parser
from jkv.client.cache_commands import run_cache
from jkv.client.router_commands import run_cluster, run_route
from jkv.client.rpc import CallError
from jkv.errors import ConfigError
from jkv.terminal import forget_stdout

_COMMANDS = {
    "generate": commands.run_generate,
    "chat": commands.run_chat,
    "tokenize": commands.run_tokenize,
    "health": commands.run_health,
    "cache": run_cache,
    "cluster": run_cluster,
    "route": run_route,
}
_TO_ROUTERS = ("cluster", "route")
_INTERRUPTED = 130


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command. Returns 0, 1 for a failed call, 2 for unusable arguments, 130 after Ctrl-C."""
    args = build_parser().parse_args(argv)
    try:
        to = RouterConnection if args.command in _TO_ROUTERS else Connection
        connection = to(**flags.given(to, args))
        return _COMMANDS[args.command](args, connection)
    except ConfigError as error:
        return _fail(str(error), 2)
    except CallError as error:
        return _fail(str(error), 1)
    except KeyboardInterrupt:
        print(file=sys.stderr)
        return _INTERRUPTED
    except BrokenPipeError:
        forget_stdout()
        return 1


def _fail(message: str, status: int) -> int:
    print(f"error: {message}", file=sys.stderr)
    return status
