"""Activation: the commands that start the server, with and without --plugin."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from dataclasses import replace
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType

import pytest

from mlx_lm_kvpersist import _startup
from mlx_lm_kvpersist.host.stopping import requested_plugins
from tests.support.host import PTH, Environment, place_of_transformers

STOCK_COMMANDS = {
    "console script": ("mlx_lm.server",),
    "mlx_lm server": ("mlx_lm", "server"),
    "python -m mlx_lm server": ("python", "-m", "mlx_lm", "server"),
    "python -m mlx_lm.server": ("python", "-m", "mlx_lm.server"),
}
COMMANDS = {
    **STOCK_COMMANDS,
    "python -m mlx_lm_kvpersist server": ("python", "-m", "mlx_lm_kvpersist", "server"),
}
FAILING = ("mlx_lm.server", "--plugin", "failing", "--port", "0")  # 8080 may be in use
OURS = "import sys; print([m for m in sys.modules if m.startswith('mlx_lm_kvpersist')])"


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
    return place_of_transformers(tmp_path_factory.mktemp("first"))


@pytest.fixture(scope="module")
def environment(environment: Environment, path: str) -> Environment:
    return replace(environment, path=path)


@pytest.fixture(scope="module")
def stock_environment(stock_environment: Environment, path: str) -> Environment:
    return replace(stock_environment, path=path)


@pytest.mark.parametrize("command", COMMANDS.values(), ids=COMMANDS)
def test_every_start_command_shows_the_plugins_options(
    environment: Environment, command: tuple[str, ...]
) -> None:
    done = environment.run(*command, "--plugin", "echo", "--help")
    assert done.returncode == 0, done.stderr
    assert "\nplugins:\n  --plugin NAME" in done.stdout
    assert "Installed: echo, editing, failing, kvpersist, misspelt, wrong" in " ".join(
        done.stdout.split()
    )
    assert "\necho:\n  Records what it is asked.\n\n  --echo-file ECHO_FILE" in done.stdout
    assert done.stdout.index("--prefill-step-size") < done.stdout.index("\nplugins:")


def test_symbolic_link_to_the_script_loads_plugins(environment: Environment) -> None:
    link = environment.bin / "serve"
    link.symlink_to(environment.bin / "mlx_lm.server")
    done = environment.run(link, "--plugin", "echo", "--help")
    link.unlink()
    assert "--echo-file" in done.stdout, done.stderr


@pytest.mark.parametrize(
    "command",
    [
        pytest.param(command, id=name, marks=[pytest.mark.slow] if "mlx_lm server" in name else [])
        for name, command in STOCK_COMMANDS.items()
    ],
)
def test_help_without_the_plugin_option_equals_stocks(
    environment: Environment, stock_environment: Environment, command: tuple[str, ...]
) -> None:
    ours, stock = (env.run(*command, "--help") for env in (environment, stock_environment))
    assert ours.returncode == stock.returncode == 0
    assert ours.stdout == stock.stdout
    assert "plugin" not in stock.stdout


def test_our_package_is_not_imported_without_the_plugin_option(environment: Environment) -> None:
    done = environment.run("python", "-c", f"import mlx_lm.server; {OURS}")
    assert done.stdout == "[]\n", done.stderr


def test_startup_does_not_import_libraries_that_only_requests_need(
    environment: Environment,
) -> None:
    late = ["prometheus_client", "unittest.mock", "obstore", "mlx_lm_kvpersist.store.shared"]
    code = f"""
import sys, mlx_lm.server, mlx_lm_kvpersist.plugin, mlx_lm_kvpersist.host.patching.patches
print("mlx_lm_kvpersist.store.disk" in sys.modules, [m for m in {late} if m in sys.modules])"""
    done = environment.run("python", "-c", code)
    assert done.stdout == "True []\n", done.stderr


def test_plugin_option_of_another_program_changes_nothing(environment: Environment) -> None:
    code = "import mlx_lm.server as s; print(s.run.__module__, type(s.argparse).__name__)"
    done = environment.run("python", "-c", code, "--plugin", "echo")
    assert done.stdout == "mlx_lm.server module\n", done.stderr


LAUNCHERS = {
    "import first": "import mlx_lm_kvpersist, mlx_lm.server\nmlx_lm_kvpersist.install()\n"
    "mlx_lm.server.main()",
    "install first": "import mlx_lm_kvpersist\nmlx_lm_kvpersist.install()\n"
    "from mlx_lm.server import main\nmain()",
    "main first": "from mlx_lm.server import main\nimport mlx_lm_kvpersist\n"
    "mlx_lm_kvpersist.install()\nmain()",
}


@pytest.fixture
def without_pth(environment: Environment) -> Iterator[Environment]:
    (pth := environment.site_packages / PTH.name).rename(pth.with_suffix(".off"))
    yield environment
    pth.with_suffix(".off").rename(pth)


@pytest.mark.parametrize("code", LAUNCHERS.values(), ids=LAUNCHERS)
def test_custom_launcher_can_install_the_plugin(
    without_pth: Environment, tmp_path: Path, code: str
) -> None:
    launcher = tmp_path / "serve.py"
    launcher.write_text(code, encoding="utf-8")
    done = without_pth.run_forked("python", launcher, "--help")
    assert "--kvpersist-dir" in done.stdout, done.stderr


@pytest.mark.parametrize(
    "code",
    [
        pytest.param(code, id=name, marks=[] if name == "main first" else [pytest.mark.slow])
        for name, code in LAUNCHERS.items()
    ],
)
def test_command_line_of_a_custom_launcher_overrides_install(
    without_pth: Environment, tmp_path: Path, code: str
) -> None:
    launcher = tmp_path / "serve.py"
    launcher.write_text(code, encoding="utf-8")
    other = without_pth.run_forked("python", launcher, "--plugin", "echo", "--help")
    assert "--echo-file" in other.stdout and "--kvpersist-dir" not in other.stdout


def test_install_loads_the_named_plugin_and_unknown_plugins_are_refused(
    without_pth: Environment, tmp_path: Path
) -> None:
    launcher, code = tmp_path / "serve.py", LAUNCHERS["install first"]
    launcher.write_text(code, encoding="utf-8")
    unknown = without_pth.run_forked("python", launcher, "--plugin", "nothing")
    assert unknown.returncode == 1 and unknown.stderr.count("\n") == 1
    assert "no plugin named 'nothing'" in unknown.stderr
    launcher.write_text(code.replace("install()", "install('echo')"), encoding="utf-8")
    named = without_pth.run_forked("python", launcher, "--help")
    assert "--echo-file" in named.stdout and "--kvpersist-dir" not in named.stdout


def test_plugin_option_works_with_launchers_without_install(
    environment: Environment, tmp_path: Path
) -> None:
    """The .pth file is necessary: without it, stock refuses the option."""
    launcher = tmp_path / "serve.py"
    launcher.write_text("import mlx_lm.server\nmlx_lm.server.main()\n", encoding="utf-8")
    done = environment.run_forked("python", launcher, "--plugin", "echo", "--help")
    assert "--echo-file" in done.stdout, done.stderr
    assert "--plugin" not in environment.run_forked("python", launcher, "--help").stdout
    bare = environment.run_forked("python", launcher, "--plugin")
    assert "--plugin: expected one argument" in bare.stderr


def test_command_server_works_without_the_pth_file(without_pth: Environment) -> None:
    without_pth.add_script("mlx-lm-kvpersist", "mlx_lm_kvpersist.cli.main")
    done = without_pth.run_forked("mlx-lm-kvpersist", "server", "--help")
    assert "--kvpersist-dir" in done.stdout and "--prefill-step-size" in done.stdout, done.stderr


def test_pth_file_executed_twice_installs_one_import_hook(environment: Environment) -> None:
    line = PTH.read_text().strip()
    code = f"{line}\nimport sys\nprint(sum('Server' in type(f).__name__ for f in sys.meta_path))"
    done = environment.run("python", "-c", code, "mlx_lm.server", "--plugin=echo")
    assert done.stdout == "1\n", done.stderr


def test_without_the_pth_only_the_module_form_accepts_plugins(
    without_pth: Environment,
) -> None:
    refused = without_pth.run_forked("mlx_lm.server", "--plugin", "echo", "--help-me")
    command = ("python", "-m", "mlx_lm_kvpersist", "server")
    done = without_pth.run_forked(*command, "--plugin=echo", "-h")
    assert refused.returncode == 2
    assert "unrecognized arguments: --plugin" in refused.stderr
    assert "--echo-file" in done.stdout


def test_error_for_an_unknown_plugin_lists_installed_plugins(environment: Environment) -> None:
    done = environment.run_forked("mlx_lm.server", "--plugin", "nothing", "--model", "m")
    assert done.returncode == 1
    assert done.stderr == (
        "mlx_lm.server --plugin nothing: no plugin named 'nothing' is installed in this "
        "environment; installed: echo, editing, failing, kvpersist, misspelt, wrong\n"
    )


@pytest.mark.parametrize(
    ("plugin", "expected_message"),
    [("misspelt", "unknown hook 'modle_loaded'"), ("wrong", "{'arguments'}")],
)
def test_plugin_with_an_invalid_hook_stops_startup(
    environment: Environment, plugin: str, expected_message: str
) -> None:
    done = environment.run_forked("mlx_lm.server", "--plugin", plugin, "--model", "m")
    assert done.returncode == 1
    assert done.stderr.count("\n") == 1
    assert expected_message in done.stderr


@pytest.mark.parametrize("hook", ["init", "add_options", "configure", "routes"])
def test_failing_plugin_stops_startup_with_one_line(environment: Environment, hook: str) -> None:
    done = environment.run_forked(*FAILING, "--log-level", "ERROR", env={"FAIL_IN": hook})
    assert done.returncode == 1
    assert done.stderr == (
        "mlx_lm.server --plugin failing: stopped by an unexpected RuntimeError: a fault of the "
        "plugin (--log-level DEBUG shows the traceback)\n"
    )


def test_config_error_is_printed_without_its_type(environment: Environment) -> None:
    env = {"FAIL_IN": "configure", "FAIL_WITH": "config"}
    done = environment.run_forked(*FAILING, env=env)
    assert done.returncode == 1
    assert done.stderr == (
        "mlx_lm.server --plugin failing: found a bad option, expected a good one\n"
    )


def test_debug_prints_the_traceback_before_the_error_line(environment: Environment) -> None:
    done = environment.run_forked(*FAILING, "--log-level", "DEBUG", env={"FAIL_IN": "configure"})
    assert "Traceback (most recent call last)" in done.stderr
    assert done.stderr.splitlines()[-1].startswith("mlx_lm.server --plugin failing: stopped by")


@pytest.mark.parametrize(
    ("argv", "names"),
    [
        (["--plugin", "a", "--model", "m"], ["a"]),
        (["--plugin=a", "--plugin", "b", "--plugin", "a"], ["a", "b"]),
        (["--plugin"], []),
        (["--plugin", "--model", "m"], []),
        ([], []),
    ],
)
def test_requested_plugins_are_read_from_the_command_line(
    argv: list[str], names: list[str]
) -> None:
    assert requested_plugins(argv) == names


def test_no_search_for_garbage_looks_at_imported_objects() -> None:
    n_frozen = gc.get_freeze_count()
    with _startup.without_garbage():
        imported: list[list[int]] = [[] for _ in range(100_000)]
    assert gc.isenabled()
    assert gc.get_freeze_count() >= n_frozen + len(imported)


def test_import_hook_changes_only_mlx_lm_server(monkeypatch: pytest.MonkeyPatch) -> None:
    finder = _startup.ServerFinder()
    assert finder.find_spec("mlx_lm.generate", None) is None
    spec = finder.find_spec("mlx_lm.server", sys.modules["mlx_lm"].__path__)
    assert isinstance(spec, ModuleSpec)
    assert isinstance(spec.loader, _startup.ServerLoader)
    assert spec.origin is not None and spec.origin.endswith("server.py")
    module = ModuleType("mlx_lm.server")
    module.__package__ = "mlx_lm"
    module.__spec__ = spec
    monkeypatch.setitem(sys.modules, "mlx_lm.server", module)
    spec.loader.exec_module(module)
    stock = module.main.__wrapped__
    prepared: list[list[str]] = []
    monkeypatch.setattr(_startup, "prepare", prepared.append)
    monkeypatch.setattr(sys, "argv", ["serve.py", "--plugin", "a", "--plugin=b", "--help"])
    with pytest.raises(SystemExit):
        module.main()
    assert prepared == [["a", "b"]]
    monkeypatch.setattr(sys, "argv", ["serve.py", "--help"])
    with pytest.raises(SystemExit):
        module.main()
    assert len(prepared) == 1 and stock.__module__ == "mlx_lm.server"
    # Later code finds the loader that loaded the module.
    assert not isinstance(module.__loader__, _startup.ServerLoader)
    assert not isinstance(module.__spec__.loader, _startup.ServerLoader)
