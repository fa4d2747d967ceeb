"""The server that `python -m jkv.bench tiers` measures: one that runs, or one of its own."""

from __future__ import annotations

import shlex
import tempfile
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from jkv.bench.cache_admin import CacheAdmin
from jkv.bench.drive import Target, connected
from jkv.bench.engine_process import EngineProcess
from jkv.bench.options import ModelOptions, parse_lengths
from jkv.errors import ConfigError
from jkv.flags import flag

_SERVER = "target"


@dataclass(frozen=True, kw_only=True)
class TiersOptions(ModelOptions):
    """A server of its own, with all tiers on, unless `target` names one."""

    target: str | None = flag(
        group=_SERVER,
        exclusive="server",
        metavar="URL",
        default_text="a server that this starts and restarts",
        help="grpc://HOST:PORT of a jkv server with --load-policy always and nothing else to do",
    )
    serve_flags: str | None = flag(
        group=_SERVER,
        exclusive="server",
        metavar="FLAGS",
        default_text="none",
        help="more flags for the server that this starts: --serve-flags='--l3-sync --model PATH'",
    )
    directory: str | None = flag(
        group=_SERVER,
        metavar="DIR",
        default_text="the system's temporary one",
        help="where that server keeps its L3, and where the raw disk is measured",
    )
    input_lens: str = flag("512,2048,4000", group="load", metavar="N,N,...", help="prompt lengths in tokens")
    repeats: int = flag(3, group="load", minimum=1, help="prompts of each length; the medians are reported")

    def __post_init__(self) -> None:
        super().__post_init__()
        parse_lengths(self.input_lens)
        if self.directory is not None and not Path(self.directory).is_dir():
            raise ConfigError(f"--directory {self.directory}: is not a directory")

    @property
    def lengths(self) -> tuple[int, ...]:
        return parse_lengths(self.input_lens)


class Engine:
    """A connected server; `restart` gives it a new process and a new connection, and the same L3."""

    def __init__(self, options: TiersOptions, directory: Path) -> None:
        self.directory = directory
        self.target: Target
        self.admin: CacheAdmin
        self._options = options
        self._open = AsyncExitStack()

    @property
    def subject(self) -> str:
        return f"{self.target.info.model} at {self._options.target or 'a server of its own'}"

    @property
    def can_restart(self) -> bool:
        return self._options.target is None

    async def start(self) -> None:
        """Raises TargetError where the server does not start or answer, ConfigError for unusable flags."""
        options = self._options
        url = options.target or await self._spawn()
        self.target = await self._open.enter_async_context(
            connected(url, model=options.model, vocab_size=options.vocab_size, timeout_s=options.timeout)
        )
        self.admin = CacheAdmin(self.target.client)

    async def stop(self) -> None:
        await self._open.aclose()

    async def restart(self) -> None:
        await self.stop()
        await self.start()

    async def _spawn(self) -> str:
        flags = ["--l3-dir", str(self.directory / "l3"), "--load-policy", "always"]
        process, address = await EngineProcess.start(flags + shlex.split(self._options.serve_flags or ""))
        self._open.push_async_callback(process.stop)
        return f"grpc://{address}"


@asynccontextmanager
async def engine(options: TiersOptions) -> AsyncIterator[Engine]:
    """The server to measure, stopped afterwards if it was started here."""
    with tempfile.TemporaryDirectory(prefix="jkv-tiers-", dir=options.directory) as made:
        started = Engine(options, Path(made))
        try:
            await started.start()
            yield started
        finally:
            await started.stop()
