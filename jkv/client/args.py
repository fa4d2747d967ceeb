"""The client's command line."""

from __future__ import annotations

import argparse
import re
from dataclasses import dataclass

from jkv import flags
from jkv.errors import ConfigError
from jkv.flags import flag

_CONNECTION, _REQUEST, _SAMPLING, _PREFIX = "connection", "request", "sampling", "prefix"
_TIERS = ("l1", "l2", "l3")
_SERVERS = "the server's"
_ADDRESS = re.compile(r"([^\s:/\[\]]+|\[[0-9a-fA-F:]+\]):[0-9]{1,5}")
_UINT32, _UINT64, _INT32 = 2**32 - 1, 2**64 - 1, 2**31 - 1


@dataclass(frozen=True, kw_only=True)
class Connection:
    """How to reach the server and how to print its answer."""

    address: str = flag(
        "127.0.0.1:50051", group=_CONNECTION, metavar="HOST:PORT", help="where the server listens"
    )
    timeout: float | None = flag(
        group=_CONNECTION,
        metavar="SECONDS",
        minimum=0,
        default_text="none; 5 for health",
        help="give up after this long",
    )
    json: bool = flag(False, group=_CONNECTION, help="print one JSON object")

    def __post_init__(self) -> None:
        flags.check(self)
        if not _ADDRESS.fullmatch(self.address):
            raise ConfigError(f"--address {self.address!r}: expected HOST:PORT, as in 127.0.0.1:50051")


@dataclass(frozen=True, kw_only=True)
class RouterConnection(Connection):
    """How to reach a router."""

    address: str = flag(
        "127.0.0.1:50050", group=_CONNECTION, metavar="HOST:PORT", help="where the router listens"
    )


@dataclass(frozen=True, kw_only=True)
class Request:
    """What a generation asks for besides its input and sampling."""

    model: str | None = flag(group=_REQUEST, default_text="the one served", help="the model's name")
    salt: str | None = flag(group=_REQUEST, help="share cached pages only with requests of the same salt")
    cache: bool = flag(True, group=_REQUEST, help="read and fill the prefix cache")
    request_id: str | None = flag(group=_REQUEST, metavar="ID", default_text="random", help="name in the log")
    priority: int = flag(
        0, group=_REQUEST, minimum=-(2**31), maximum=_INT32, help="higher is scheduled earlier"
    )

    def __post_init__(self) -> None:
        flags.check(self)


def _bias(text: str) -> tuple[int, float]:
    token, _, value = text.partition("=")
    try:
        pair = int(token), float(value)
    except ValueError:
        raise ValueError("expected TOKEN_ID=VALUE, as in 42=-3.5") from None
    if not 0 <= pair[0] <= _UINT32:
        raise ValueError(f"the token id must be from 0 to {_UINT32}")
    return pair


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """The fields of the API's Sampling; what is not given is left to the server, which checks the ranges."""

    max_tokens: int | None = flag(
        group=_SAMPLING,
        minimum=0,
        maximum=_UINT32,
        default_text="what is left of the model's length",
        help="most tokens to generate",
    )
    temperature: float | None = flag(
        group=_SAMPLING, default_text=_SERVERS, help="0 always takes the likeliest token"
    )
    top_p: float | None = flag(
        group=_SAMPLING, default_text=_SERVERS, help="sample from the likeliest tokens that make up this much"
    )
    top_k: int | None = flag(
        group=_SAMPLING,
        minimum=-(2**31),
        maximum=_INT32,
        default_text=_SERVERS,
        help="sample from this many of the likeliest tokens; 0 is off",
    )
    min_p: float | None = flag(
        group=_SAMPLING,
        default_text=_SERVERS,
        help="drop tokens less likely than this share of the likeliest",
    )
    seed: int | None = flag(
        group=_SAMPLING, minimum=0, maximum=_UINT64, default_text="random", help="makes sampling repeatable"
    )
    stop: tuple[str, ...] = flag(
        (), group=_SAMPLING, metavar="TEXT", help="end the text before this string; repeatable"
    )
    stop_token_ids: tuple[int, ...] = flag(
        (), group=_SAMPLING, minimum=0, maximum=_UINT32, help="end at this token; repeatable"
    )
    repetition_penalty: float | None = flag(
        group=_SAMPLING, default_text=_SERVERS, help="above 1 makes tokens already there less likely"
    )
    presence_penalty: float | None = flag(
        group=_SAMPLING, default_text=_SERVERS, help="subtracted once from tokens already generated"
    )
    frequency_penalty: float | None = flag(
        group=_SAMPLING, default_text=_SERVERS, help="subtracted for each time a token was generated"
    )
    logit_bias: tuple[str, ...] = flag(
        (), group=_SAMPLING, parse=_bias, metavar="ID=VALUE", help="added to a token's logit; repeatable"
    )
    logprobs: bool = flag(False, group=_SAMPLING, help="report log-probabilities; needs --json")
    top_logprobs: int | None = flag(
        group=_SAMPLING, minimum=0, maximum=_UINT32, help="alternatives to report for each token"
    )
    ignore_eos: bool = flag(False, group=_SAMPLING, help="go on after the model's end token")
    n: int | None = flag(
        group=_SAMPLING, minimum=0, maximum=_UINT32, default_text="1", help="sequences to sample"
    )

    def __post_init__(self) -> None:
        flags.check(self)


@dataclass(frozen=True, kw_only=True)
class CachePrefix:
    """Whose cached pages a prefix means."""

    model: str | None = flag(group=_PREFIX, default_text="the one served", help="the model's name")
    salt: str | None = flag(group=_PREFIX, help="the salt of the requests that cached it")


@dataclass(frozen=True, kw_only=True)
class Pin:
    """How long a prefix stays pinned; the server checks the range."""

    ttl: float | None = flag(
        group=_PREFIX, metavar="SECONDS", default_text="until unpin", help="let go after this long"
    )

    def __post_init__(self) -> None:
        flags.check(self)


def build_parser() -> argparse.ArgumentParser:
    """`jkv COMMAND ...`; every command has the connection flags."""
    parser = argparse.ArgumentParser(prog="jkv", description="Talk to a jkv server.", allow_abbrev=False)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    generate = _command(commands, "generate", "continue a prompt", Request, Sampling)
    generate.add_argument("prompt", nargs="?", metavar="PROMPT", help="the text to continue; - reads stdin")
    generate.add_argument("--token-ids", metavar="1,2,3", help="token ids to continue, instead of a text")
    chat = _command(commands, "chat", "talk to the model; without MESSAGE, turn by turn", Request, Sampling)
    chat.add_argument("message", nargs="?", metavar="MESSAGE", help="one turn only; piped stdin works too")
    chat.add_argument("--system", metavar="TEXT", help="the system message that starts the chat")
    tokenize = _command(commands, "tokenize", "print a text's token ids")
    tokenize.add_argument("text", metavar="TEXT", help="the text; - reads stdin")
    tokenize.add_argument("--model", help="the model's name (default: the one served)")
    _command(commands, "health", "print SERVING or NOT_SERVING; status 0 or 1")
    _add_cache(commands)
    _add_router(commands)
    return parser


def _add_cache(commands: argparse._SubParsersAction) -> None:
    """`jkv cache COMMAND ...`."""
    text = "see and move what a server has cached; from its own machine only"
    cache = commands.add_parser("cache", help=text, description=f"{text[0].upper()}{text[1:]}.")
    inner = cache.add_subparsers(dest="cache_command", required=True, metavar="COMMAND")
    _command(inner, "stats", "print what each tier holds and has done")
    _prefix_command(inner, "lookup", "print how many tokens of a prompt are cached, and where")
    _prefix_command(inner, "pin", "keep a prompt's cached pages from eviction", Pin)
    _prefix_command(inner, "unpin", "let a pinned prompt's pages be evicted again")
    prefetch = _prefix_command(inner, "prefetch", "bring a prompt's pages up from lower tiers")
    prefetch.add_argument("--tier", choices=_TIERS[:2], default="l1", help="where to (default: l1)")
    demote = _command(inner, "demote", "write a tier's pages into the tier below, then drop them")
    demote.add_argument("tier", choices=_TIERS[:2])
    flush = _command(inner, "flush", "drop all pages of these tiers; the others keep theirs")
    flush.add_argument("tiers", nargs="+", choices=_TIERS, metavar="TIER", help="l1, l2 or l3; one or more")
    _command(inner, "drain", "wait until all pages on their way down are written")
    _prefix_command(inner, "evict", "drop a prompt's pages from all tiers; with --salt alone, that salt's")


def _add_router(commands: argparse._SubParsersAction) -> None:
    """`jkv cluster COMMAND ...` and `jkv route COMMAND ...`."""
    text = "see a cluster as its router does"
    cluster = commands.add_parser("cluster", help=text, description=f"{text[0].upper()}{text[1:]}.")
    inner = cluster.add_subparsers(dest="cluster_command", required=True, metavar="COMMAND")
    _command(inner, "status", "print the engines, their load and what the index has", to=RouterConnection)
    text = "ask a router where requests would go"
    route = commands.add_parser("route", help=text, description=f"{text[0].upper()}{text[1:]}.")
    inner = route.add_subparsers(dest="route_command", required=True, metavar="COMMAND")
    text = "print what each engine would make of a prompt, and which one is chosen"
    _prefix_command(inner, "explain", text, to=RouterConnection)


def _prefix_command(
    commands: argparse._SubParsersAction, name: str, text: str, *more: type, to: type = Connection
) -> argparse.ArgumentParser:
    """A command about a prompt's pages."""
    parser = _command(commands, name, text, CachePrefix, *more, to=to)
    parser.add_argument("prompt", nargs="?", metavar="PROMPT", help="the text; - reads stdin")
    parser.add_argument("--token-ids", metavar="1,2,3", help="token ids, instead of a text")
    parser.add_argument(
        "--messages",
        metavar="FILE",
        help='a chat, instead of a text: JSON such as [{"role": "user", "content": "Hi"}]; - reads stdin',
    )
    return parser


def _command(
    commands: argparse._SubParsersAction, name: str, text: str, *more: type, to: type = Connection
) -> argparse.ArgumentParser:
    parser = commands.add_parser(
        name, help=text, description=f"{text[0].upper()}{text[1:]}.", allow_abbrev=False
    )
    for cls in (to, *more):
        flags.add_flags(parser, cls)
    return parser
