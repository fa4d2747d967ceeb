"""`python -m jkv.bench serving|interference|cached --target URL ...`."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

from jkv import flags
from jkv.bench import cached, interference, serving
from jkv.bench.calibrate import calibrate
from jkv.bench.drive import Target, connected
from jkv.bench.options import TargetOptions
from jkv.bench.report import Report, as_json, as_text
from jkv.errors import JkvError
from jkv.terminal import forget_stdout


@dataclass(frozen=True, kw_only=True)
class _Benchmark:
    options: type[TargetOptions]
    run: Callable[[Any, Target], Awaitable[Report]]
    description: str


_BENCHMARKS = {
    "serving": _Benchmark(
        options=serving.ServingOptions,
        run=serving.run,
        description="Send many requests; report latency, throughput, hit rate and goodput.",
    ),
    "interference": _Benchmark(
        options=interference.InterferenceOptions,
        run=interference.run,
        description="Report how long prompts slow a running stream, and how fast they prefill beside it.",
    ),
    "cached": _Benchmark(
        options=cached.CachedOptions,
        run=cached.run,
        description="Compare the time to first token of new prompts with that of the same prompts again.",
    ),
}

_USAGE = (
    "usage: python -m jkv.bench {"
    + ",".join(_BENCHMARKS)
    + "} --target URL [flags]; -h after one lists its flags"
)


def main(argv: Sequence[str] | None = None) -> int:
    """0 when every request succeeded, 1 when any failed, 2 when nothing could be measured."""
    name, *rest = (sys.argv[1:] if argv is None else argv) or [""]
    if name in ("-h", "--help"):
        print(_USAGE)
        return 0
    benchmark = _BENCHMARKS.get(name)
    if benchmark is None:
        print(f"{_USAGE}\nerror: {name!r} is not a benchmark", file=sys.stderr)
        return 2
    try:
        options = flags.parse(
            benchmark.options, rest, prog=f"python -m jkv.bench {name}", description=benchmark.description
        )
        return asyncio.run(_run(name, benchmark, options))
    except JkvError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        forget_stdout()
        return 1


async def _run(name: str, benchmark: _Benchmark, options: TargetOptions) -> int:
    async with connected(
        options.target, model=options.model, vocab_size=options.vocab_size, timeout_s=options.timeout
    ) as target:
        calibration = await asyncio.to_thread(calibrate)
        report = await benchmark.run(options, target)
    render = as_json if options.json else as_text
    print(render(name, options, target.info, calibration, report), flush=True)
    return 1 if report.errors else 0


if __name__ == "__main__":
    sys.exit(main())
