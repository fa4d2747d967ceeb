"""A store in a bucket of a server that speaks S3's protocol."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from jkv.cache.l3.objects import open_objects
from jkv.errors import ConfigError
from tests.cache.l3.pages import assert_serves, chain, delete, identity, open_store, read, reasons, write
from tests.cache.l3.s3_server import BUCKET, S3Server, s3_server

MODEL = identity()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    with s3_server(tmp_path_factory.mktemp("s3")) as server:
        yield server


@pytest.fixture(autouse=True)
def reachable(server: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in server.variables.items():
        monkeypatch.setenv(name, value)


def test_pages_are_published_listed_read_and_deleted() -> None:
    store = open_store(f"s3://{BUCKET}/pages", MODEL, "a")
    infos = chain(MODEL, 5)
    assert reasons(write(store, MODEL, infos)) == [None] * 5
    assert_serves(store, MODEL, infos)
    assert {page.key for page in store.list().own} == {info.key for info in infos}
    assert delete(store, store.page(infos[4]))
    assert read(store, store.page(infos[4]), infos[4]).reason == "missing"
    store.close()
    again = open_store(f"s3://{BUCKET}/pages", MODEL)
    assert again.owner == "a"
    assert_serves(again, MODEL, infos[:4])
    again.close()


def test_an_owner_is_held_by_one_and_read_by_all() -> None:
    first = open_store(f"s3://{BUCKET}/shared/", MODEL, "a")
    infos = chain(MODEL, 3)
    write(first, MODEL, infos)
    with pytest.raises(ConfigError, match="--l3-owner a: a running engine holds it"):
        open_store(f"s3://{BUCKET}/shared/", MODEL, "a")
    second = open_store(f"s3://{BUCKET}/shared/", MODEL)
    assert second.owner != "a"
    assert second.place.token == first.place.token
    foreign = {page.key: page for page in second.list().foreign}
    for info in infos:
        assert read(second, foreign[info.key], info).reason is None
    for store in (first, second):
        store.close()


def test_the_variable_for_s3_alone_goes_first(server: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", f"{server.endpoint}/")
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    assert open_objects(f"s3://{BUCKET}/nothing", sync=False).list() == []


def test_an_endpoint_that_is_no_url_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "127.0.0.1:9000")
    with pytest.raises(ConfigError, match=r"--l3-dir s3://pages.*\$AWS_ENDPOINT_URL is '127.0.0.1:9000'"):
        open_store(f"s3://{BUCKET}/pages", MODEL)


@pytest.mark.full
def test_a_server_that_is_not_there_ends_the_start_within_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    with pytest.raises(ConfigError, match=f"--l3-dir s3://{BUCKET}/pages: cannot be used"):
        open_store(f"s3://{BUCKET}/pages", MODEL)
