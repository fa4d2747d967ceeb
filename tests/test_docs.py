"""The documentation names what the code has: every flag, every field of the API, every file that it links."""

from __future__ import annotations

import argparse
import re
from pathlib import Path

import pytest

from jkv import flags
from jkv.api import jkv_pb2 as pb
from jkv.api import sampling, validate
from jkv.bench.__main__ import _BENCHMARKS
from jkv.cache.l3.reasons import Reason
from jkv.client.args import CachePrefix, Connection, Pin, Request, Sampling
from jkv.config import ServeConfig
from jkv.plan.options import PlanOptions
from jkv.router.config import RouterConfig

_ROOT = Path(__file__).parent.parent
_PAGES = sorted([_ROOT / "README.md", *(_ROOT / "docs").glob("*.md")])
# Of programs whose flags are not made from a dataclass.
_OTHER_FLAGS = {
    "--help",
    "--config",
    "--out",
    "--full",
    "--check",
    "--pythonpath",
    "--token-ids",
    "--messages",
    "--tier",
    "--data-dir",
    "--port",
    "--auto-compaction-retention",
    # --xla_force_host_platform_device_count, of XLA_FLAGS.
    "--xla",
    # vLLM's, in the comparison.
    "--tensor-parallel-size",
    "--enable-prompt-tokens-details",
    "--enable-prefix-caching",
}


def _actions(*classes: type) -> list[argparse.Action]:
    parser = argparse.ArgumentParser(add_help=False)
    for cls in classes:
        flags.add_flags(parser, cls)
    return parser._actions


def _row(action: argparse.Action) -> str:
    """A flag as README.md's table has it, from what `--help` prints."""
    assert action.help is not None
    text, default = re.fullmatch(r"(.*) \(default: (.*)\)", action.help.replace("%%", "%")).groups()  # type: ignore[union-attr]
    name = " ".join(filter(None, (action.option_strings[0], action.metavar)))  # type: ignore[arg-type]
    return f"| `{name}` | {default} | {text} |"


def test_readme_lists_the_flags_of_serve_as_help_does() -> None:
    lines = (_ROOT / "README.md").read_text().splitlines()
    listed = [line for line in lines if line.startswith("| `--")]
    assert listed == [_row(action) for action in _actions(ServeConfig)]


def test_the_cluster_page_lists_the_flags_of_the_router_as_help_does() -> None:
    lines = (_ROOT / "docs" / "cluster.md").read_text().splitlines()
    listed = [line for line in lines if line.startswith("| `--")]
    assert listed == [_row(action) for action in _actions(RouterConfig)]


def test_every_flag_that_the_pages_name_exists() -> None:
    options = [PlanOptions, *(benchmark.options for benchmark in _BENCHMARKS.values())]
    known = set(_OTHER_FLAGS)
    for cls in (ServeConfig, RouterConfig, Connection, Request, Sampling, CachePrefix, Pin, *options):
        known |= {name for action in _actions(cls) for name in action.option_strings}
    for page in _PAGES:
        named = set(re.findall(r"(?<![\w-])--[a-z][a-z0-9-]*", page.read_text()))
        assert named <= known, f"{page.name} names flags that no program has"


def test_the_api_page_has_every_field_and_limit() -> None:
    text = (_ROOT / "docs" / "api.md").read_text()
    for message in pb.DESCRIPTOR.message_types_by_name.values():
        for field in message.fields:
            assert f"`{field.name}`" in text, f"docs/api.md lacks {message.name}.{field.name}"
    for limit in (
        sampling.MAX_TEMPERATURE,
        sampling.MAX_LOGIT_BIAS_ENTRIES,
        sampling.MAX_LOGIT_BIAS,
        sampling.MAX_STOP_STRINGS,
        sampling.MAX_STOP_LENGTH,
        sampling.MAX_TOP_LOGPROBS,
        sampling.MAX_N,
        validate.MAX_REQUEST_ID_LENGTH,
        validate.MAX_CACHE_SALT_LENGTH,
    ):
        assert re.search(rf"\b{limit:g}\b", text.replace(",", "")), f"docs/api.md lacks the limit {limit:g}"


def test_the_operations_page_explains_every_reason_of_a_disk_error() -> None:
    text = (_ROOT / "docs" / "operations.md").read_text()
    for reason in Reason:
        assert f"`read_{reason}`" in text or f"`write_{reason}`" in text, f"docs/operations.md lacks {reason}"


@pytest.mark.parametrize("page", _PAGES, ids=lambda page: page.name)
def test_linked_files_exist(page: Path) -> None:
    links = re.findall(r"\]\(([^)#:]+)\)", page.read_text())
    assert [link for link in links if not (page.parent / link).exists()] == []
