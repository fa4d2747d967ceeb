"""Serves the default model and shows what its KV cache saves, on one engine and on a cluster of two.

`scripts/demo` installs what this needs.
"""

from __future__ import annotations

import random
import signal
import sys
import time
from dataclasses import dataclass
from typing import Any, NoReturn

import grpc
from demo_cluster import joining, private_etcd, show_cluster
from demo_server import DemoError, redraw, serving, status, temporary_folder

from jkv.api import jkv_pb2 as pb
from jkv.api import jkv_pb2_grpc as pb_grpc
from jkv.client import show
from jkv.client.rpc import CallError, Generation, connect, generate
from jkv.terminal import aligned

_SYSTEM = "You are a helpful assistant."
_QUESTION = "Tell me a short story about a lighthouse."
_FOLLOW_UP = "Give the story a title."
_LOG_DAYS = 130
_TIERS = ("l1", "l2", "l3")
_HEAD = ("served from", "prompt tokens", *_TIERS, "TTFT", "speed-up")
_NEXT = """
Where to go next
  .venv/bin/python -m jkv.serve --l3-dir DIRECTORY    serve the model; --help lists the flags
  .venv/bin/jkv chat                                  talk to it from another terminal
  .venv/bin/jkv cache stats                           see what it has cached
  docs/cluster.md                                     several engines behind a router
  README.md, docs/                                    the gRPC API, operations, how it works
"""


@dataclass(frozen=True, kw_only=True)
class Row:
    """A line of the table: which tier served the prompt, and how long its first token took."""

    label: str
    tier: str | None
    result: Generation

    def check(self) -> None:
        """Raises DemoError where another tier than this one served any page, or none did."""
        by_tier = self.result.usage["cached_by_tier"]
        expected = by_tier[self.tier] if self.tier else 0
        if sum(by_tier.values()) != expected or (self.tier and not expected):
            raise DemoError(f"{self.label}: tokens by tier are {by_tier}")

    def cells(self, cold: Generation) -> tuple[str, ...]:
        usage, ttft = self.result.usage, _ttft(self.result)
        return (
            self.label,
            str(usage["prompt_tokens"]),
            *(str(usage["cached_by_tier"][tier]) for tier in _TIERS),
            f"{ttft * 1000:.0f} ms",
            f"{_ttft(cold) / ttft:.1f}x",
        )


def main() -> int:
    """0 when everything was shown, 1 when something failed, 130 after Ctrl-C."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _leave)
    try:
        print("Starting python -m jkv.serve; the first start fetches the model and compiles for minutes.")
        prompt = _logbook()
        with temporary_folder() as folder:
            # Load even where a slow disk makes computing faster: the demo is about loading.
            flags = ("--l3-dir", str(folder / "pages"), "--load-policy", "always")
            with serving("The server", *flags) as server, connect(server.address) as channel:
                _chat(channel)
                rows = _each_tier(channel, prompt)
            print("\n4. The server starts again: L1 and L2 are empty, L3 is what is in its folder.")
            with (
                private_etcd(folder / "etcd") as etcd,
                serving("Engine one", *flags, *joining("one", etcd)) as one,
            ):
                with connect(one.address) as channel:
                    _cache(channel).Stats(pb.CacheStatsRequest())  # connects, so that TTFT does not count it
                    rows.append(_ask(channel, prompt, "L3, after a restart", "l3"))
                _show(rows)
                show_cluster(one, etcd, flags, _logbook())
        print(_NEXT)
    except (DemoError, CallError) as error:
        redraw("")
        print(f"demo: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\ndemo: interrupted", file=sys.stderr)
        return 130
    return 0


def _chat(channel: grpc.Channel) -> None:
    """Two turns; the second one finds the pages that the first one's answer filled."""
    request = pb.GenerateRequest(sampling=pb.Sampling(temperature=0, max_tokens=160))
    history = request.messages.messages
    history.add(role="system", content=_SYSTEM)
    print("\n1. A chat. The answer streams; its tokens fill pages of the L1 cache.")
    first = _turn(channel, request, _QUESTION)
    print("\n2. The next turn sends the whole chat again; L1 has its full pages of 64 tokens.")
    second = _turn(channel, request, _FOLLOW_UP)
    cached, prompt = second.usage["cached_by_tier"]["l1"], first.usage["prompt_tokens"]
    if cached <= prompt:
        raise DemoError(f"turn 2 found {cached} tokens in L1, no more than turn 1's prompt of {prompt}")
    print(f"{cached} tokens came from L1; at least {cached - prompt} of them were generated in turn 1.")


def _turn(channel: grpc.Channel, request: pb.GenerateRequest, text: str) -> Generation:
    request.messages.messages.add(role="user", content=text)
    print(f"> {text}")
    result = generate(channel, request, None, show.print_chunk)
    request.messages.messages.add(role="assistant", content=result.choices[0].text)
    print(f"\n[{show.usage_line(result)}]")
    return result


def _each_tier(channel: grpc.Channel, prompt: str) -> list[Row]:
    """The same long prompt from nowhere, then from each tier, with the tiers above it flushed."""
    cache = _cache(channel)
    print("\n3. A long prompt, never seen before, and then the same again from each tier of the cache.")
    rows = [_ask(channel, prompt, "none (cold)", None), _ask(channel, prompt, "L1, device", "l1")]
    status("waiting until all pages are written to L2 and L3")
    cache.Drain(pb.DrainRequest())
    cache.Flush(pb.FlushRequest(tiers=["l1"]))
    rows.append(_ask(channel, prompt, "L2, host memory", "l2"))
    cache.Flush(pb.FlushRequest(tiers=["l1", "l2"]))
    rows.append(_ask(channel, prompt, "L3, disk", "l3"))
    redraw("")
    return rows


def _cache(channel: grpc.Channel) -> Any:
    return pb_grpc.CacheStub(channel)


def _ask(channel: grpc.Channel, prompt: str, label: str, tier: str | None) -> Row:
    status(f"asking: {label}")
    request = pb.GenerateRequest(prompt=prompt, sampling=pb.Sampling(temperature=0, max_tokens=8))
    row = Row(label=label, tier=tier, result=generate(channel, request, None, show.print_nothing))
    row.check()
    return row


def _show(rows: list[Row]) -> None:
    cold = rows[0].result
    print()
    for line in aligned([_HEAD, *(row.cells(cold) for row in rows)]):
        print(f"  {line}")
    same = all(row.result.choices[0].token_ids == cold.choices[0].token_ids for row in rows)
    print(f"The generated tokens are {'the same' if same else 'NOT the same'} each time.")


def _logbook() -> str:
    """About 3,000 tokens of text that no server has in its cache by chance."""
    draw = random.Random(time.time_ns())
    winds, works = ("northern", "southern", "eastern", "western"), ("lamp", "stairs", "boat", "radio", "roof")
    days = (
        f"Day {day}: a {draw.choice(winds)} wind, {draw.randint(2, 40)} ships passed, "
        f"and the keeper repaired the {draw.choice(works)}."
        for day in range(1, _LOG_DAYS + 1)
    )
    return "The logbook of a lighthouse.\n" + "\n".join(days) + "\nIn short, the keeper"


def _ttft(result: Generation) -> float:
    if result.ttft is None:
        raise DemoError("no token arrived")
    return result.ttft


def _leave(number: int, _: object) -> NoReturn:
    sys.exit(128 + number)


if __name__ == "__main__":
    sys.exit(main())
