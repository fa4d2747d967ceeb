from __future__ import annotations

import uuid
from collections.abc import Iterator

import pytest

from tests.router.etcd_server import EtcdServer, etcd_server


@pytest.fixture(scope="session")
def shared_etcd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EtcdServer]:
    """One for all tests that leave it as it is; each takes a `cluster` of its own."""
    with etcd_server(tmp_path_factory.mktemp("etcd")) as server:
        yield server


@pytest.fixture
def own_etcd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EtcdServer]:
    """One for a test that ill-treats it."""
    with etcd_server(tmp_path_factory.mktemp("etcd")) as server:
        yield server


@pytest.fixture
def cluster() -> str:
    return uuid.uuid4().hex[:8]
