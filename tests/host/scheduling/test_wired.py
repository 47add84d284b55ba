"""MLX's wired limit is the plugin's choice, wherever mlx-lm sets it."""

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
"""Bytes of weights: at most half of the recommended bytes, and more."""


class Weights(ProbeModel):
    """A model with as many bytes of weights as its name says."""

    def __init__(self, n_bytes: int) -> None:
        super().__init__()
        self._parts = {
            "a": mx.zeros(n_bytes // 8, mx.int32),
            "b": [mx.zeros(n_bytes // 8, mx.int32)],
        }

    def parameters(self) -> dict[str, Any]:
        return self._parts


class Wired(KVPersistPlugin):
    """The plugin with only one hook: models are served as in stock."""

    add_options = configure = shutdown = model_loaded = None  # type: ignore[assignment]


class Host:
    """The places of the stock server that set the limit, on a simulated device."""

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
        """Compute in a batch and in a stream at once, as a server may."""
        batch = self.generate.BatchGenerator(ProbeModel())
        with self.generate.wired_limit(ProbeModel(), []):
            pass
        batch.close()


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """A simulated Mac that recommends 1,000 bytes; return the calls of `mx.set_wired_limit`."""
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
    with monkeypatch.context() as before_the_patches_are_undone:
        yield Host(patched_server, before_the_patches_are_undone, calls)


def test_stock_sets_the_limit_in_all_three_places(
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
def test_mlx_gets_what_is_chosen_for_each_model(
    models: list[int], expected: list[int], host: Host
) -> None:
    with plugged(Wired()):
        host.start()
        assert host.calls == [], "a model's size decides, and none is loaded"
        for n_bytes in models:
            host.load(n_bytes)
            host.reply()
    assert host.calls == expected


def test_without_a_plugin_that_chooses_the_limit_is_stocks(host: Host) -> None:
    with plugged():
        host.start()
        host.load(SMALL)
        host.reply()
    assert host.calls == [RECOMMENDED]


def test_an_answer_that_is_no_size_is_ignored(host: Host) -> None:
    class Broken:
        @hookimpl
        def wired_limit(self) -> int:
            return -1

    with plugged(Broken()):
        host.start()
        host.load(SMALL)
    assert host.calls == [RECOMMENDED]


def test_a_device_without_wired_memory_is_left_alone(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mx, "device_info", lambda *device: {"total_memory": RECOMMENDED})
    monkeypatch.setattr(mx.metal, "is_available", lambda: False)
    monkeypatch.setattr(Wired, "wired_limit", hookimpl(lambda self: pytest.fail("it is asked")))
    with plugged(Wired()):
        host.start()
        host.load(LARGE)
        host.reply()
    assert host.calls == []
