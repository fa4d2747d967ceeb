"""`python -m jkv.convert`: write a model as an Orbax checkpoint."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from jkv.errors import JkvError
from jkv.models.orbax_convert import DTYPES
from jkv.models.resolve import convert, resolve_model


def main(arguments: Sequence[str] | None = None) -> int:
    """Convert as the command line says; the exit status is 0, or 2 after an error on stderr."""
    parser = argparse.ArgumentParser(
        prog="python -m jkv.convert",
        description="Write a model as an Orbax checkpoint, which `python -m jkv.serve --model DIR` reads.",
    )
    parser.add_argument(
        "--model",
        required=True,
        help="a built-in name, a Hugging Face repository, a directory with safetensors, or a .gguf file",
    )
    parser.add_argument(
        "--out", required=True, type=Path, metavar="DIR", help="a directory that does not exist"
    )
    parser.add_argument(
        "--dtype",
        choices=sorted(DTYPES),
        help="the type to store (default: as in the model; float32 for GGUF)",
    )
    options = parser.parse_args(arguments)
    started = time.monotonic()
    try:
        convert(resolve_model(options.model), options.out, dtype=options.dtype)
    except JkvError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(f"wrote {options.out} in {time.monotonic() - started:.1f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
