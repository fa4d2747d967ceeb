"""The flags of the KV cache: its pages, its tiers and what moves between them."""

from __future__ import annotations

import dataclasses
import math
import re
from dataclasses import dataclass

from jkv.errors import ConfigError
from jkv.flags import flag

GIB = 2**30
MIB = 2**20
PAGE_SIZES = (8, 16, 32, 64, 128, 256)
_UNITS = {"": GIB, "GiB": GIB, "MiB": MIB, "TiB": 2**40}
_SIZE = re.compile(r"\s*([0-9]+(?:\.[0-9]*)?|\.[0-9]+)\s*(MiB|GiB|TiB|)\s*", re.IGNORECASE)
# A folder of the store; one that starts with a dot could be "..".
_OWNER = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,63}")
_KV_DTYPES = ("auto", "float32", "bfloat16", "int8")
_WRITE_POLICIES = ("write-through", "write-through-selective", "write-back")
_LOAD_POLICIES = ("auto", "always")
_ADMISSIONS = ("always", "second-use")
_KV, _L3, _POLICY = "KV cache", "KV cache on disk", "KV cache policies"


def parse_gib(text: str) -> float:
    """A size in GiB: `1.5` (GiB), `512MiB`, `2GiB`, `1TiB`.

    Raises:
        ValueError: says which spellings are allowed.
    """
    match = _SIZE.fullmatch(text)
    if match is None:
        raise ValueError("expected a size such as 1.5 (GiB), 512MiB, 2GiB or 1TiB")
    unit = {name.lower(): size for name, size in _UNITS.items()}[match[2].lower()]
    size = float(match[1]) * unit / GIB
    if not math.isfinite(size):
        raise ValueError("the size is too large")
    return size


@dataclass(frozen=True, kw_only=True)
class CacheConfig:
    """The part of `ServeConfig` that the KV cache reads."""

    page_size: int = flag(
        64,
        group=_KV,
        help="tokens in a page, a power of two; only full pages are shared",
    )
    l1_gib: float | None = flag(
        group=_KV,
        exclusive="l1",
        parse=parse_gib,
        metavar="SIZE",
        default_text="what the device's memory leaves; 1GiB on CPU",
        help="memory of each device for KV pages: 1.5 (GiB), 512MiB, 2GiB",
    )
    l1_pages: int | None = flag(
        group=_KV,
        exclusive="l1",
        minimum=1,
        default_text="from --l1-gib",
        help="the same, as a number of pages",
    )
    kv_dtype: str = flag(
        "auto",
        group=_KV,
        choices=_KV_DTYPES,
        help="dtype of cached keys and values; auto follows --dtype, int8 has a scale per token and head",
    )
    l2_gib: float = flag(
        2.0,
        group=_KV,
        parse=parse_gib,
        metavar="SIZE",
        minimum=0,
        help="host memory for KV pages, taken as it fills; 0 turns this tier off",
    )

    l3_dir: str | None = flag(
        group=_L3,
        metavar="PATH_OR_URL",
        default_text="no disk tier",
        help="where pages live on disk, also after a restart: a directory, or the URL of a TensorStore "
        "key-value store (file://, gs://, s3://)",
    )
    l3_gib: float = flag(
        10.0, group=_L3, parse=parse_gib, metavar="SIZE", help="most that this server's pages take there"
    )
    l3_owner: str | None = flag(
        group=_L3,
        metavar="ID",
        default_text="an id kept in the store",
        help="the name under which this server writes; it reads the pages of all owners",
    )
    l3_sync: bool = flag(
        False,
        group=_L3,
        help="flush every page to the medium (fsync) before it counts as written; off, a power cut may lose "
        "the newest pages",
    )
    l3_min_tokens: int = flag(
        0, group=_L3, minimum=0, help="pages of prompts shorter than this are not written to disk"
    )
    l3_admission: str = flag(
        "always",
        group=_L3,
        choices=_ADMISSIONS,
        help="which pages are worth the disk: all, or those that a second request has used",
    )
    l3_write_mib_per_s: float | None = flag(
        group=_L3,
        default_text="no limit",
        help="most MiB a second to write; pages wait in L2 for it, or are not written where it is full",
    )
    l3_daily_write_gib: float | None = flag(
        group=_L3,
        parse=parse_gib,
        metavar="SIZE",
        default_text="no limit",
        help="most to write in a day (UTC), which bounds the wear of an SSD; pages beyond it are not written",
    )

    write_policy: str = flag(
        "write-through",
        group=_POLICY,
        choices=_WRITE_POLICIES,
        help="when a page is copied to the tiers below: as soon as it is full; when its prefix is used a "
        "second time (selective); only when it leaves the tier above (write-back)",
    )
    load_policy: str = flag(
        "auto",
        group=_POLICY,
        choices=_LOAD_POLICIES,
        help="auto loads a page from a lower tier only where that is faster than computing it",
    )
    load_timeout: float = flag(
        5.0,
        group=_POLICY,
        metavar="SECONDS",
        help="how long a request may wait for pages; what has not come by then is computed",
    )

    def check_cache(self) -> None:
        """What single ranges and choices do not say.

        Raises:
            ConfigError: a value out of its range, or flags that need another one.
        """
        if self.page_size not in PAGE_SIZES:
            raise ConfigError(f"--page-size {self.page_size}: must be a power of two from 8 to 256")
        self._check_above_zero()
        if self.l3_dir is None:
            self._check_no_l3_flag()
        elif not self.l3_dir.strip():
            raise ConfigError(f"--l3-dir {self.l3_dir!r}: must not be empty")
        if self.l3_owner is not None and not _OWNER.fullmatch(self.l3_owner):
            raise ConfigError(
                f"--l3-owner {self.l3_owner!r}: must be 1 to 64 letters, digits, '.', '_' or '-', "
                "not starting with '.'"
            )

    @property
    def l1_bytes(self) -> int | None:
        """`l1_gib` in bytes, or None where L1 is given in pages or left to the engine."""
        return None if self.l1_gib is None else round(self.l1_gib * GIB)

    @property
    def l2_bytes(self) -> int:
        """0 where L2 is off."""
        return round(self.l2_gib * GIB)

    @property
    def l3_bytes(self) -> int:
        """0 where L3 is off."""
        return 0 if self.l3_dir is None else round(self.l3_gib * GIB)

    @property
    def l3_write_bytes_per_s(self) -> float | None:
        """None where writes are not limited."""
        return None if self.l3_write_mib_per_s is None else self.l3_write_mib_per_s * MIB

    @property
    def l3_daily_write_bytes(self) -> int | None:
        """None where writes are not limited."""
        return None if self.l3_daily_write_gib is None else round(self.l3_daily_write_gib * GIB)

    def _check_above_zero(self) -> None:
        for name in ("l1_gib", "l3_gib", "l3_write_mib_per_s", "l3_daily_write_gib", "load_timeout"):
            value = getattr(self, name)
            if value is not None and value <= 0:
                raise ConfigError(f"--{name.replace('_', '-')} {value:g}: must be greater than 0")

    def _check_no_l3_flag(self) -> None:
        for item in dataclasses.fields(CacheConfig):
            value = getattr(self, item.name)
            if not item.name.startswith("l3_") or value == item.default:
                continue
            name = f"--{item.name.replace('_', '-')}"
            shown = (
                name
                if value is True
                else f"{name} {value:g}"
                if isinstance(value, float)
                else f"{name} {value}"
            )
            raise ConfigError(f"{shown}: needs --l3-dir, without which nothing is written to disk")
