"""Where a server that warms itself is asked."""

from __future__ import annotations

from pathlib import Path
from queue import Queue

import pytest

from mlx_lm_kvpersist.api import warming


@pytest.mark.parametrize(
    ("host", "asked"),
    [
        ("0.0.0.0", "http://127.0.0.1:80"),
        ("", "http://127.0.0.1:80"),
        ("::", "http://[::1]:80"),
        ("::1", "http://[::1]:80"),
        ("localhost", "http://localhost:80"),
    ],
)
def test_a_server_of_all_addresses_is_asked_at_its_own(
    monkeypatch: pytest.MonkeyPatch, host: str, asked: str
) -> None:
    urls: Queue[str] = Queue()

    def wait_for(url: str) -> str:
        urls.put(url)
        return "it is a test"

    monkeypatch.setattr(warming, "_wait_for", wait_for)
    warming.warm_at_start([], host, 80, Path("no-store"), None)
    assert urls.get(timeout=5) == asked
