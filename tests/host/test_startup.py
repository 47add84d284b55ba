"""Activation: the forms in which the server is started, with and without --plugin."""

from __future__ import annotations

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

STOCK_FORMS = {
    "console script": ("mlx_lm.server",),
    "mlx_lm server": ("mlx_lm", "server"),
    "python -m mlx_lm server": ("python", "-m", "mlx_lm", "server"),
    "python -m mlx_lm.server": ("python", "-m", "mlx_lm.server"),
}
FORMS = {
    **STOCK_FORMS,
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


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_every_form_shows_the_plugins_options(
    environment: Environment, form: tuple[str, ...]
) -> None:
    done = environment.run(*form, "--plugin", "echo", "--help")
    assert done.returncode == 0, done.stderr
    assert "\nplugins:\n  --plugin NAME" in done.stdout
    assert "Installed: echo, editing, failing, kvpersist, misspelt, wrong" in " ".join(
        done.stdout.split()
    )
    assert "\necho:\n  Records what it is asked.\n\n  --echo-file ECHO_FILE" in done.stdout
    assert done.stdout.index("--prefill-step-size") < done.stdout.index("\nplugins:")


def test_a_symbolic_link_to_the_script_works_as_the_script_does(environment: Environment) -> None:
    link = environment.bin / "serve"
    link.symlink_to(environment.bin / "mlx_lm.server")
    done = environment.run(link, "--plugin", "echo", "--help")
    link.unlink()
    assert "--echo-file" in done.stdout, done.stderr


@pytest.mark.parametrize(
    "form",
    [
        pytest.param(form, id=name, marks=[pytest.mark.slow] if "mlx_lm server" in name else [])
        for name, form in STOCK_FORMS.items()
    ],
)
def test_without_the_flag_the_help_is_stocks(
    environment: Environment, stock_environment: Environment, form: tuple[str, ...]
) -> None:
    ours, stock = (env.run(*form, "--help") for env in (environment, stock_environment))
    assert ours.returncode == stock.returncode == 0
    assert ours.stdout == stock.stdout
    assert "plugin" not in stock.stdout


def test_without_the_flag_nothing_of_ours_is_imported(environment: Environment) -> None:
    done = environment.run("python", "-c", f"import mlx_lm.server; {OURS}")
    assert done.stdout == "[]\n", done.stderr


def test_a_start_imports_no_library_that_only_later_requests_need(
    environment: Environment,
) -> None:
    late = ["prometheus_client", "unittest.mock", "obstore", "mlx_lm_kvpersist.store.shared"]
    code = f"""
import sys, mlx_lm.server, mlx_lm_kvpersist.plugin, mlx_lm_kvpersist.host.patching.patches
print("mlx_lm_kvpersist.store.disk" in sys.modules, [m for m in {late} if m in sys.modules])"""
    done = environment.run("python", "-c", code)
    assert done.stdout == "True []\n", done.stderr


def test_the_flag_of_another_program_changes_nothing(environment: Environment) -> None:
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
def test_a_launcher_of_ones_own_installs_the_plugin(
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
def test_the_command_line_of_a_launcher_goes_first(
    without_pth: Environment, tmp_path: Path, code: str
) -> None:
    launcher = tmp_path / "serve.py"
    launcher.write_text(code, encoding="utf-8")
    other = without_pth.run_forked("python", launcher, "--plugin", "echo", "--help")
    assert "--echo-file" in other.stdout and "--kvpersist-dir" not in other.stdout


def test_a_launcher_of_ones_own_names_the_plugin(without_pth: Environment, tmp_path: Path) -> None:
    launcher, code = tmp_path / "serve.py", LAUNCHERS["install first"]
    launcher.write_text(code, encoding="utf-8")
    unknown = without_pth.run_forked("python", launcher, "--plugin", "nothing")
    assert unknown.returncode == 1 and unknown.stderr.count("\n") == 1
    assert "no plugin named 'nothing'" in unknown.stderr
    launcher.write_text(code.replace("install()", "install('echo')"), encoding="utf-8")
    named = without_pth.run_forked("python", launcher, "--help")
    assert "--echo-file" in named.stdout and "--kvpersist-dir" not in named.stdout


def test_plugin_works_with_launchers_that_know_nothing_of_it(
    environment: Environment, tmp_path: Path
) -> None:
    """With the .pth; without it stock refuses the option."""
    launcher = tmp_path / "serve.py"
    launcher.write_text("import mlx_lm.server\nmlx_lm.server.main()\n", encoding="utf-8")
    done = environment.run_forked("python", launcher, "--plugin", "echo", "--help")
    assert "--echo-file" in done.stdout, done.stderr
    assert "--plugin" not in environment.run_forked("python", launcher, "--help").stdout
    bare = environment.run_forked("python", launcher, "--plugin")
    assert "--plugin: expected one argument" in bare.stderr


def test_the_command_server_needs_no_pth(without_pth: Environment) -> None:
    without_pth.add_script("mlx-lm-kvpersist", "mlx_lm_kvpersist.cli.main")
    done = without_pth.run_forked("mlx-lm-kvpersist", "server", "--help")
    assert "--kvpersist-dir" in done.stdout and "--prefill-step-size" in done.stdout, done.stderr


def test_a_pth_executed_twice_installs_once(environment: Environment) -> None:
    line = PTH.read_text().strip()
    code = f"{line}\nimport sys\nprint(sum('Server' in type(f).__name__ for f in sys.meta_path))"
    done = environment.run("python", "-c", code, "mlx_lm.server", "--plugin=echo")
    assert done.stdout == "1\n", done.stderr


def test_without_the_pth_the_flag_is_refused_and_the_module_form_works(
    without_pth: Environment,
) -> None:
    refused = without_pth.run_forked("mlx_lm.server", "--plugin", "echo", "--help-me")
    form = ("python", "-m", "mlx_lm_kvpersist", "server")
    done = without_pth.run_forked(*form, "--plugin=echo", "-h")
    assert refused.returncode == 2
    assert "unrecognized arguments: --plugin" in refused.stderr
    assert "--echo-file" in done.stdout


def test_an_unknown_plugin_is_named_with_those_installed(environment: Environment) -> None:
    done = environment.run_forked("mlx_lm.server", "--plugin", "nothing", "--model", "m")
    assert done.returncode == 1
    assert done.stderr == (
        "mlx_lm.server --plugin nothing: no plugin named 'nothing' is installed in this "
        "environment; installed: echo, editing, failing, kvpersist, misspelt, wrong\n"
    )


@pytest.mark.parametrize(
    ("plugin", "says"),
    [("misspelt", "unknown hook 'modle_loaded'"), ("wrong", "{'arguments'}")],
)
def test_a_plugin_with_a_wrong_hook_stops_the_start(
    environment: Environment, plugin: str, says: str
) -> None:
    done = environment.run_forked("mlx_lm.server", "--plugin", plugin, "--model", "m")
    assert done.returncode == 1
    assert done.stderr.count("\n") == 1
    assert says in done.stderr


@pytest.mark.parametrize("hook", ["init", "add_options", "configure", "routes"])
def test_a_plugin_that_fails_stops_the_start_with_one_line(
    environment: Environment, hook: str
) -> None:
    done = environment.run_forked(*FAILING, "--log-level", "ERROR", env={"FAIL_IN": hook})
    assert done.returncode == 1
    assert done.stderr == (
        "mlx_lm.server --plugin failing: stopped by an unexpected RuntimeError: a fault of the "
        "plugin (--log-level DEBUG shows the traceback)\n"
    )


def test_an_error_of_ours_is_told_as_it_is(environment: Environment) -> None:
    env = {"FAIL_IN": "configure", "FAIL_WITH": "config"}
    done = environment.run_forked(*FAILING, env=env)
    assert done.returncode == 1
    assert done.stderr == (
        "mlx_lm.server --plugin failing: found a bad option, expected a good one\n"
    )


def test_debug_shows_the_traceback_before_the_line(environment: Environment) -> None:
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
def test_plugins_are_read_before_the_options_are(argv: list[str], names: list[str]) -> None:
    assert requested_plugins(argv) == names


def test_the_finder_touches_one_module(monkeypatch: pytest.MonkeyPatch) -> None:
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
    # Later code finds the loader that really loaded the module.
    assert not isinstance(module.__loader__, _startup.ServerLoader)
    assert not isinstance(module.__spec__.loader, _startup.ServerLoader)
