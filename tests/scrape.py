"""What Prometheus would read of a server's /metrics."""

from __future__ import annotations

import urllib.request

from prometheus_client.parser import text_string_to_metric_families


class Samples:
    """`samples[name, label value, ...]`, the values in the order of their labels' names."""

    def __init__(self, text: str) -> None:
        found = [one for family in text_string_to_metric_families(text) for one in family.samples]
        self._values: dict[tuple[str, ...], float] = {
            (one.name, *(one.labels[label] for label in sorted(one.labels))): one.value for one in found
        }

    def __getitem__(self, key: tuple[str, ...] | str) -> float:
        return self._values[key if isinstance(key, tuple) else (key,)]

    @property
    def names(self) -> set[str]:
        """Of jkv's own."""
        return {key[0] for key in self._values if key[0].startswith("jkv_")}

    def of(self, name: str) -> dict[tuple[str, ...], float]:
        return {key[1:]: value for key, value in self._values.items() if key[0] == name}


def scrape(address: str) -> Samples:
    """`address` is HOST:PORT."""
    with urllib.request.urlopen(f"http://{address}/metrics", timeout=20) as answer:
        assert answer.headers.get_content_type() == "text/plain"
        return Samples(answer.read().decode())
