"""Plugins by name, and hooks that fail."""

from __future__ import annotations

import re
from importlib.metadata import EntryPoint
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from mlx_lm_kvpersist.errors import PluginFault, PluginNotFound
from mlx_lm_kvpersist.host import hooks, manager
from tests.support.host import plugged

from . import plugins


@pytest.fixture
def entry_points(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """The plugins that are installed, as name and value."""
    installed = {
        "echo": "tests.host.plugins:Echo",
        "module": "tests.host.plugins",
        "misspelt": "tests.host.plugins:Misspelt",
        "wrong": "tests.host.plugins:WrongArguments",
    }

    def found(group: str, name: str | None = None) -> list[EntryPoint]:
        assert group == "mlx_lm.server.plugins"
        return [EntryPoint(n, v, group) for n, v in installed.items() if name in (None, n)]

    monkeypatch.setattr("importlib.metadata.entry_points", found)
    return installed


def test_a_class_is_instantiated_and_a_module_is_taken_as_it_is(
    entry_points: dict[str, str],
) -> None:
    loaded = manager.load_plugins(["echo", "module"])
    assert isinstance(loaded.get_plugin("echo"), plugins.Echo)
    assert loaded.get_plugin("module") is plugins


def test_an_unknown_name_is_told_with_the_known_ones(entry_points: dict[str, str]) -> None:
    with pytest.raises(PluginNotFound, match=r"'kv' .* installed: echo, misspelt, module, wrong"):
        manager.load_plugins(["echo", "kv"])
    entry_points.clear()
    with pytest.raises(PluginNotFound, match="installed: none"):
        manager.load_plugins(["kv"])


@pytest.mark.parametrize("name", ["misspelt", "wrong"])
def test_a_hook_that_the_server_lacks_fails(entry_points: dict[str, str], name: str) -> None:
    with pytest.raises(PluginFault, match=f"^the plugin {name}: "):
        manager.load_plugins([name])


def test_every_hook_is_asked() -> None:
    """A hook in the specification that nothing calls would be an empty promise."""
    host = Path(hooks.__file__).parent
    paths = [host.parent / "plugin.py", *(p for p in host.rglob("*.py") if p.name != "probes.py")]
    sources = "".join(path.read_text() for path in paths)
    for name in (name for name, value in vars(hooks).items() if is_hook(value)):
        assert re.search(rf'\bask\w*\(\s*"{name}"|hook\.{name}\.', sources), name


def is_hook(value: Any) -> bool:
    return hasattr(value, f"{hooks.PROJECT}_spec")


HEADERS = [("X-A", "a")]
OTHERS = [("X-B", "b")]


def answering(*answers: Any) -> list[Any]:
    """Return plugins that give these answers to `response_headers`, or raise them if exceptions."""

    def plugin(answer: Any) -> Any:
        def response_headers() -> Any:
            if isinstance(answer, Exception):
                raise answer
            return answer

        return SimpleNamespace(response_headers=hooks.hookimpl(response_headers))

    return [plugin(answer) for answer in answers]


def test_none_is_no_answer() -> None:
    with plugged(*answering(None, HEADERS, OTHERS)):
        assert manager.ask("response_headers", request=None, is_early=False) == [HEADERS, OTHERS]
        assert manager.is_implemented("response_headers")
    assert not manager.is_implemented("response_headers")


def test_plugins_are_asked_in_the_order_of_the_command_line(entry_points: dict[str, str]) -> None:
    loaded = manager.load_plugins(["echo", "module"])
    names = [name for name, _ in loaded.list_name_plugin()]
    assert names.index("module") < names.index("echo")
    with plugged(*answering(HEADERS, OTHERS)):
        assert manager.ask("response_headers", request=None, is_early=False) == [HEADERS, OTHERS]


def test_one_plugins_exception_silences_no_other(caplog: pytest.LogCaptureFixture) -> None:
    with plugged(*answering(ValueError("bug"), HEADERS)):
        for _ in range(3):
            assert manager.ask("response_headers", request=None, is_early=False) == [HEADERS]
    failures = [record for record in caplog.records if record.levelname == "ERROR"]
    assert len(failures) == 1 and "failed in hook response_headers" in failures[0].message
    assert failures[0].exc_info, "the first failure of a kind has its traceback"


def test_what_failed_before_the_server_began_is_logged_again(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Checks at startup ask the same hooks; later failures would be at DEBUG only."""
    failing = answering(ValueError("bug"))
    for n_failures in (1, 2):
        with plugged(*failing):
            assert manager.ask("response_headers", request=None, is_early=False) == []
        failures = [record for record in caplog.records if record.levelname == "ERROR"]
        assert len(failures) == n_failures


def test_a_wrong_answer_names_its_plugin_and_hook_and_is_ignored(
    caplog: pytest.LogCaptureFixture,
) -> None:
    wrong = manager.PluginManager()
    wrong.register(answering(5)[0], name="five")
    with manager.using(wrong):
        assert manager.ask("response_headers", request=None, is_early=False) == []
        said = "plugin five in hook response_headers answered 5, expected a list of pairs"
        wrong.register(SimpleNamespace(routes=hooks.hookimpl(lambda: 5)), name="six")
        with pytest.raises(PluginFault, match="plugin six in hook routes answered 5, expected a l"):
            manager.ask("routes")
    assert said in caplog.text
    with pytest.raises(PluginFault, match=f"^answered {'w' * 199}…, expected a list$"):
        hooks.expect(False, "w" * 201, "a list")
