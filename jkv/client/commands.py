"""One function for each command; each returns the process's exit status."""

from __future__ import annotations

import argparse
import importlib
import sys
from contextlib import suppress
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from jkv import flags
from jkv.api import jkv_pb2 as pb
from jkv.api import jkv_pb2_grpc as pb_grpc
from jkv.client import inputs, show
from jkv.client.args import Connection, Request, Sampling
from jkv.client.rpc import CallError, Generation, connect, generate
from jkv.errors import ConfigError

_HEALTH_TIMEOUT = 5.0
_DETAIL_TIMEOUT = 1.0  # what is not needed to tell whether the server serves


def run_generate(args: argparse.Namespace, connection: Connection) -> int:
    request = _request(args, connection)
    if (args.prompt is None) == (args.token_ids is None):
        raise ConfigError("generate: give either PROMPT (- for stdin) or --token-ids")
    if args.token_ids is not None:
        request.token_ids.ids.extend(inputs.token_ids(args.token_ids))
    else:
        request.prompt = inputs.text("PROMPT", args.prompt)
    with connect(connection.address) as channel:
        _answer(channel, request, connection)
    return 0


def run_chat(args: argparse.Namespace, connection: Connection) -> int:
    request = _request(args, connection)
    if args.system is not None:
        request.messages.messages.add(role="system", content=inputs.text("--system", args.system))
    message = args.message
    if message is None and not sys.stdin.isatty():
        message = inputs.stdin().removesuffix("\n")
    if message is None:
        return _converse(request, connection)
    request.messages.messages.add(role="user", content=inputs.text("MESSAGE", message))
    with connect(connection.address) as channel:
        _answer(channel, request, connection)
    return 0


def run_tokenize(args: argparse.Namespace, connection: Connection) -> int:
    request = pb.TokenizeRequest(
        prompt=inputs.text("TEXT", args.text), model=inputs.text("--model", args.model or "")
    )
    with connect(connection.address) as channel:
        stub: Any = pb_grpc.GenerationStub(channel)
        ids = list(stub.Tokenize(request, timeout=connection.timeout).ids)
    if connection.json:
        show.print_json({"ids": ids, "count": len(ids)})
    else:
        print(",".join(map(str, ids)))
        print(f"{len(ids)} tokens", file=sys.stderr)
    return 0


def run_health(args: argparse.Namespace, connection: Connection) -> int:
    timeout = _HEALTH_TIMEOUT if connection.timeout is None else connection.timeout
    with connect(connection.address) as channel:
        stub: Any = health_pb2_grpc.HealthStub(channel)
        answer = stub.Check(health_pb2.HealthCheckRequest(), timeout=timeout)
        status = health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status)
        failing = _failing_tiers(channel, min(timeout, _DETAIL_TIMEOUT)) if status == "SERVING" else {}
    if connection.json:
        show.print_json({"status": status, "failing_tiers": failing})
    else:
        print(status)
        for tier, reasons in failing.items():
            print(f"{tier} is not used for now: {reasons}", file=sys.stderr)
    return 0 if status == "SERVING" else 1


def _failing_tiers(channel: grpc.Channel, timeout: float) -> dict[str, str]:
    """Tiers whose breaker is not closed, with their errors by reason; none where the server does not tell."""
    stub: Any = pb_grpc.CacheStub(channel)
    try:
        tiers = stub.Stats(pb.CacheStatsRequest(), timeout=timeout).tiers
    except grpc.RpcError:
        return {}
    return {
        tier.tier: ", ".join(f"{reason} {count}" for reason, count in sorted(tier.errors_by_reason.items()))
        for tier in tiers
        if tier.breaker != "closed"
    }


def _converse(request: pb.GenerateRequest, connection: Connection) -> int:
    """Turn by turn until the end of the input; a turn that fails is taken back, to be tried again."""
    if connection.json or request.sampling.n > 1:
        raise ConfigError("chat: --json and --n need a MESSAGE or piped stdin")
    with suppress(ImportError):
        importlib.import_module("readline")  # line editing for input()
    history = request.messages.messages
    while True:
        try:
            line = input("> ")
        except EOFError:
            print()
            return 0
        if not line.strip():
            continue
        history.add(role="user", content=inputs.text("MESSAGE", line))
        try:
            with connect(connection.address) as channel:
                result = _answer(channel, request, connection)
        except CallError as error:
            history.pop()
            print(f"error: {error}", file=sys.stderr)
            continue
        history.add(role="assistant", content=result.choices[0].text)


def _answer(channel: grpc.Channel, request: pb.GenerateRequest, connection: Connection) -> Generation:
    """Generate and print as the flags say."""
    streams = not connection.json and request.sampling.n <= 1
    result = generate(
        channel, request, connection.timeout, show.print_chunk if streams else show.print_nothing
    )
    if connection.json:
        show.print_json(show.as_document(result, logprobs=request.sampling.logprobs))
        return result
    if streams:
        print()
    else:
        show.print_choices(result)
    show.print_usage(result)
    return result


def _request(args: argparse.Namespace, connection: Connection) -> pb.GenerateRequest:
    """The request without its input."""
    asked = Request(**flags.given(Request, args))
    sampling = flags.given(Sampling, args)
    Sampling(**sampling)  # checks what protobuf could not hold
    sampling["logit_bias"] = dict(sampling.get("logit_bias", ()))
    sampling["stop"] = [inputs.text("--stop", text) for text in sampling.get("stop", ())]
    if sampling.get("logprobs") and not connection.json:
        raise ConfigError("--logprobs: needs --json, which prints them")
    return pb.GenerateRequest(
        sampling=pb.Sampling(**sampling),
        cache_salt=inputs.text("--salt", asked.salt or ""),
        no_cache=not asked.cache,
        request_id=inputs.text("--request-id", asked.request_id or ""),
        priority=asked.priority,
        model=inputs.text("--model", asked.model or ""),
    )
