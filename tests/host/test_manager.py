"""Loading plugins by name, calling hooks, and handling their failures."""

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
    """The installed plugins: names and the values of their entry points."""
    installed = {
        "echo": "tests.host.plugins:Echo",
        "module": "tests.host.plugins",
        "misspelt": "tests.host.plugins:Misspelt",
        "wrong": "tests.host.plugins:WrongArguments",
    }

    def select(group: str, name: str | None = None) -> list[EntryPoint]:
        assert group == "mlx_lm.server.plugins"
        return [
            EntryPoint(key, value, group) for key, value in installed.items() if name in (None, key)
        ]

    monkeypatch.setattr("importlib.metadata.entry_points", select)
    return installed


def test_plugin_class_is_instantiated_and_plugin_module_is_not(
    entry_points: dict[str, str],
) -> None:
    loaded = manager.load_plugins(["echo", "module"])
    assert isinstance(loaded.get_plugin("echo"), plugins.Echo)
    assert loaded.get_plugin("module") is plugins


def test_error_for_an_unknown_plugin_lists_installed_plugins(entry_points: dict[str, str]) -> None:
    with pytest.raises(PluginNotFound, match=r"'kv' .* installed: echo, misspelt, module, wrong"):
        manager.load_plugins(["echo", "kv"])
    entry_points.clear()
    with pytest.raises(PluginNotFound, match="installed: none"):
        manager.load_plugins(["kv"])


@pytest.mark.parametrize("name", ["misspelt", "wrong"])
def test_plugin_with_an_unknown_hook_or_argument_is_refused(
    entry_points: dict[str, str], name: str
) -> None:
    with pytest.raises(PluginFault, match=f"^the plugin {name}: "):
        manager.load_plugins([name])


def test_code_calls_every_specified_hook() -> None:
    """A plugin's implementation of any other hook would never run."""
    host = Path(hooks.__file__).parent
    paths = [host.parent / "plugin.py", *(p for p in host.rglob("*.py") if p.name != "probes.py")]
    sources = "".join(path.read_text() for path in paths)
    for name in (name for name, value in vars(hooks).items() if is_hook(value)):
        assert re.search(rf'\bask\w*\(\s*"{name}"|hook\.{name}\.', sources), name


def is_hook(value: Any) -> bool:
    return hasattr(value, f"{hooks.PROJECT}_spec")


HEADERS = [("X-A", "a")]
OTHER_HEADERS = [("X-B", "b")]


def answering(*answers: Any) -> list[Any]:
    """Return plugins that answer `response_headers` with these values, or raise the exceptions."""

    def plugin(answer: Any) -> Any:
        def response_headers() -> Any:
            if isinstance(answer, Exception):
                raise answer
            return answer

        return SimpleNamespace(response_headers=hooks.hookimpl(response_headers))

    return [plugin(answer) for answer in answers]


def test_ask_omits_answers_of_none() -> None:
    with plugged(*answering(None, HEADERS, OTHER_HEADERS)):
        assert manager.ask("response_headers", request=None, is_early=False) == [
            HEADERS,
            OTHER_HEADERS,
        ]
        assert manager.is_implemented("response_headers")
    assert not manager.is_implemented("response_headers")


def test_hooks_are_called_in_the_order_of_the_command_line(entry_points: dict[str, str]) -> None:
    loaded = manager.load_plugins(["echo", "module"])
    names = [name for name, _ in loaded.list_name_plugin()]
    assert names.index("module") < names.index("echo")
    with plugged(*answering(HEADERS, OTHER_HEADERS)):
        assert manager.ask("response_headers", request=None, is_early=False) == [
            HEADERS,
            OTHER_HEADERS,
        ]


def test_failing_plugin_is_logged_once_and_other_plugins_still_answer(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with plugged(*answering(ValueError("bug"), HEADERS)):
        for _ in range(3):
            assert manager.ask("response_headers", request=None, is_early=False) == [HEADERS]
    failures = [record for record in caplog.records if record.levelname == "ERROR"]
    assert len(failures) == 1 and "failed in hook response_headers" in failures[0].message
    assert failures[0].exc_info, "the first failure of a kind has its traceback"


def test_each_plugin_manager_logs_the_first_failure(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Startup checks call the same hooks; later failures would otherwise be at DEBUG only."""
    failing = answering(ValueError("bug"))
    for n_failures in (1, 2):
        with plugged(*failing):
            assert manager.ask("response_headers", request=None, is_early=False) == []
        failures = [record for record in caplog.records if record.levelname == "ERROR"]
        assert len(failures) == n_failures


def test_error_for_a_wrong_answer_names_plugin_and_hook(
    caplog: pytest.LogCaptureFixture,
) -> None:
    wrong = manager.PluginManager()
    wrong.register(answering(5)[0], name="five")
    with manager.using(wrong):
        assert manager.ask("response_headers", request=None, is_early=False) == []
        expected_message = (
            "plugin five in hook response_headers answered 5, expected a list of pairs"
        )
        wrong.register(SimpleNamespace(routes=hooks.hookimpl(lambda: 5)), name="six")
        with pytest.raises(PluginFault, match="plugin six in hook routes answered 5, expected a l"):
            manager.ask("routes")
    assert expected_message in caplog.text
    with pytest.raises(PluginFault, match=f"^answered {'w' * 199}…, expected a list$"):
        hooks.expect(False, "w" * 201, "a list")
