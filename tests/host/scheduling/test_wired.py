"""The plugin chooses MLX's wired limit, wherever mlx-lm sets the limit."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import mlx.core as mx
import pytest

from mlx_lm_kvpersist.host.hooks import hookimpl
from mlx_lm_kvpersist.host.patching.probes import ARGS, ProbeModel
from mlx_lm_kvpersist.plugin import KVPersistPlugin
from tests.support.host import plugged

RECOMMENDED = 1000
SMALL, LARGE = 500, 504
"""Bytes of weights: half of the recommended bytes, and more than half."""


class Weights(ProbeModel):
    """A model with `n_bytes` of weights."""

    def __init__(self, n_bytes: int) -> None:
        super().__init__()
        self._parts = {
            "a": mx.zeros(n_bytes // 8, mx.int32),
            "b": [mx.zeros(n_bytes // 8, mx.int32)],
        }

    def parameters(self) -> dict[str, Any]:
        return self._parts


class Wired(KVPersistPlugin):
    """The plugin without its store: models are served as in stock."""

    add_options = configure = shutdown = model_loaded = None  # type: ignore[assignment]


class Host:
    """The parts of the stock server that set the limit, on a simulated device."""

    def __init__(
        self, server: ModuleType, monkeypatch: pytest.MonkeyPatch, calls: list[int]
    ) -> None:
        self.server, self.calls = server, calls
        self.generate: Any = importlib.import_module("mlx_lm.generate")
        monkeypatch.setattr(server, "run", lambda host, port, provider: None)
        monkeypatch.setattr(server, "load", self._load)
        monkeypatch.setattr(server.logging, "basicConfig", lambda **options: None)
        monkeypatch.setattr(sys, "argv", ["mlx_lm.server"])
        self.provider: Any = None

    def _load(self, path: Any, return_config: bool = False, **options: Any) -> Any:
        made = Weights(int(path)), SimpleNamespace(chat_template=None)
        return (*made, {}) if return_config else made

    def start(self) -> None:
        self.server.main()
        self.provider = self.server.ModelProvider(ARGS)

    def load(self, n_bytes: int) -> None:
        self.provider._load(str(n_bytes))

    def reply(self) -> None:
        """Begin a batch and a stream at the same time, as a server may."""
        batch = self.generate.BatchGenerator(ProbeModel())
        with self.generate.wired_limit(ProbeModel(), []):
            pass
        batch.close()


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Simulate a Mac that recommends 1,000 bytes; return the limits given to MLX."""
    made: list[int] = []
    limits = [0]

    def set_wired_limit(limit: int) -> int:
        made.append(limit)
        limits.append(limit)
        return limits[-2]

    info = {"max_recommended_working_set_size": RECOMMENDED, "memory_size": 2 * RECOMMENDED}
    monkeypatch.setattr(mx, "set_wired_limit", set_wired_limit)
    monkeypatch.setattr(mx, "device_info", lambda *device: info)
    monkeypatch.setattr(mx.metal, "is_available", lambda: True)
    return made


@pytest.fixture
def host(
    calls: list[int], patched_server: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Host]:
    with monkeypatch.context() as host_patches:  # undone before the patches of `patched_server`
        yield Host(patched_server, host_patches, calls)


def test_stock_sets_the_limit_in_main_in_batches_and_in_streams(
    calls: list[int], server: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The negative control: without our patches all calls reach MLX."""
    host = Host(server, monkeypatch, calls)
    host.start()
    assert calls == [RECOMMENDED]
    host.reply()
    assert calls == [RECOMMENDED] * 5


@pytest.mark.parametrize(
    ("models", "expected"),
    [
        ([SMALL], []),
        ([LARGE], [RECOMMENDED]),
        ([SMALL, LARGE, LARGE, SMALL], [RECOMMENDED, 0]),
    ],
)
def test_wired_limit_follows_the_size_of_each_loaded_model(
    models: list[int], expected: list[int], host: Host
) -> None:
    with plugged(Wired()):
        host.start()
        assert host.calls == [], "the size of a model decides, and no model is loaded"
        for n_bytes in models:
            host.load(n_bytes)
            host.reply()
    assert host.calls == expected


def test_without_a_plugin_stocks_limit_is_set(host: Host) -> None:
    with plugged():
        host.start()
        host.load(SMALL)
        host.reply()
    assert host.calls == [RECOMMENDED]


def test_negative_limit_from_a_plugin_is_ignored(host: Host) -> None:
    class Broken:
        @hookimpl
        def wired_limit(self) -> int:
            return -1

    with plugged(Broken()):
        host.start()
        host.load(SMALL)
    assert host.calls == [RECOMMENDED]


def test_no_limit_is_set_on_a_device_without_wired_memory(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mx, "device_info", lambda *device: {"total_memory": RECOMMENDED})
    monkeypatch.setattr(mx.metal, "is_available", lambda: False)
    monkeypatch.setattr(
        Wired, "wired_limit", hookimpl(lambda self: pytest.fail("the hook is called"))
    )
    with plugged(Wired()):
        host.start()
        host.load(LARGE)
        host.reply()
    assert host.calls == []
