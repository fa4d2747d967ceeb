"""`python -m jkv.plan`: what a model would need and reach on a machine, told without that machine."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from jkv import flags
from jkv.errors import ConfigError, JkvError
from jkv.plan.options import PlanOptions
from jkv.terminal import forget_stdout


def main(argv: Sequence[str] | None = None) -> int:
    """0 for a plan that fits, 1 for one that does not or does not compile, 2 for unusable flags."""
    try:
        options = flags.parse(
            PlanOptions,
            argv,
            prog="python -m jkv.plan",
            description="Compile a model's programs for a machine that need not be there; report the memory "
            "they leave for the KV cache, and how fast they could be.",
        )
        options.machine.enter()
        from jkv.plan import make, report  # imports jax, which reads the environment once

        plan = make.make_plan(options, lambda c: print(f"compiled {c.program}", file=sys.stderr, flush=True))
        print(report.as_json(plan) if options.json else report.as_text(plan), flush=True)
    except JkvError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2 if isinstance(error, ConfigError) else 1
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        forget_stdout()
        return 1
    return 0 if plan.memory.fits else 1


if __name__ == "__main__":
    sys.exit(main())
