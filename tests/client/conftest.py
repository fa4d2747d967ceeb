from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.client.server import Server, running


@pytest.fixture
def server() -> Iterator[Server]:
    with running() as (started, _):
        yield started
