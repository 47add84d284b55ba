"""The wheel serves in every Python: chat, kill -9, start again, and the conversation continues.

Each Python gets an environment with the dependencies that the index has for it, in a folder whose
name has spaces.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tarfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from mlx_lm_kvpersist.api.admin import STATS_PATH
from tests.packaging.conftest import PYTHONS, files_of, find_python, uv
from tests.support import Reply, ServerProcess
from tests.support.host import REPOSITORY

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]
_EXTRA = "" if sys.platform == "darwin" else "[cpu]"
SOME_TESTS = (
    *("tests/match", "tests/api/test_docs.py", "tests/cli/test_docs.py", "tests/host/test_docs.py"),
    *("tests/test_config.py", "tests/test_layers.py", "tests/cli/test_store.py"),
    *("tests/host/test_startup.py", "tests/benchmarks/test_results.py"),
    "tests/support_test/test_mutate.py",
)
SYSTEM = "You keep the log of a lighthouse. " * 30
QUESTION = {"role": "user", "content": "What did the keeper write on the first day of the storm?"}
MESSAGES = [{"role": "system", "content": SYSTEM}, QUESTION]


@dataclass(frozen=True)
class Installed:
    """An environment with the wheel; `before` is its content without the wheel."""

    folder: Path
    before: set[str]

    @property
    def python(self) -> str:
        return str(self.folder / "bin" / "python")

    @property
    def minor(self) -> int:
        code = "import sys; print(sys.version_info.minor)"
        return int(subprocess.check_output([self.python, "-c", code]))

    def version(self, package: str) -> str:
        code = f"from importlib.metadata import version; print(version({package!r}))"
        return subprocess.check_output([self.python, "-c", code], text=True).strip()

    def server(
        self, model: Path, store: Path, *flags: str, env: dict[str, str] | None = None
    ) -> ServerProcess:
        """Return a server of this environment, which cannot import the checkout."""
        return ServerProcess(
            model,
            *("--plugin", "kvpersist", "--kvpersist-dir", str(store)),
            python=self.python,
            launcher=(*flags, "-m", "mlx_lm", "server"),
            cwd=self.folder,
            env={"PYTHONPATH": "", "PYTHONDONTWRITEBYTECODE": "", **(env or {})},
        )


def installed(wheel: Path, version: str, folder: Path) -> Installed:
    python = find_python(version)
    if python is None:
        pytest.skip(f"there is no Python {version} here to try")
    uv("venv", "--quiet", "--python", python, folder)
    interpreter = folder / "bin" / "python"
    uv("pip", "install", "--quiet", "--python", interpreter, f"{wheel}{_EXTRA}")
    uv("pip", "uninstall", "--quiet", "--python", interpreter, "mlx-lm-kvpersist")
    before = files_of(folder)
    uv("pip", "install", "--quiet", "--python", interpreter, f"{wheel}{_EXTRA}")
    return Installed(folder, before)


@pytest.fixture(scope="module", params=PYTHONS)
def environment(
    request: pytest.FixtureRequest, wheel: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Installed]:
    folder = tmp_path_factory.mktemp("a folder with spaces") / f"python {request.param}"
    prepared = installed(wheel, request.param, folder)
    yield prepared
    shutil.rmtree(folder)


def chat(server: ServerProcess) -> Reply:
    return server.chat(MESSAGES, session="log", temperature=0.0, max_tokens=8)


def assert_restored(server: ServerProcess, reply: Reply) -> None:
    """Assert that the server restores the prompt from disk and gives the same reply."""
    again = chat(server)
    assert again.text == reply.text
    assert again.kvpersist["outcome"] == "EXACT" and again.kvpersist["tier"] == "disk"
    assert int(again.kvpersist["restored"]) > 100
    assert again.cached_tokens == again.prompt_tokens - 1


def test_a_conversation_survives_kill9(
    environment: Installed, tiny_model: Path, tmp_path: Path
) -> None:
    # Python 3.10 gets the newest mlx-lm that supports it.
    expected = "0.31.3" if environment.minor == 10 else "0.32."
    assert environment.version("mlx-lm").startswith(expected)
    store = tmp_path / "a store with spaces"
    with environment.server(tiny_model, store) as server:
        reply = chat(server)
        assert reply.kvpersist["outcome"] == "MISS"
        settle(server)
        server.kill9()
        server.start()
        assert_restored(server, reply)
    # This server runs without assertions and docstrings, in an ASCII locale.
    locale = {"LC_ALL": "C", "LANG": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    with environment.server(tiny_model, store, "-OO", env=locale) as server:
        assert_restored(server, reply)
        other_reply = server.chat(
            [{"role": "user", "content": "Grüße, 世界, \U0001f44b"}], max_tokens=4
        )
        assert other_reply.kvpersist["outcome"] in ("MISS", "DIVERGE")


def test_the_commands_work_without_docstrings_in_an_ascii_locale(environment: Installed) -> None:
    """-OO removes docstrings and assertions, which `--help` and `selftest` could depend on."""
    variables = {**os.environ, "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    variables["PATH"] = f"{environment.folder / 'bin'}{os.pathsep}{variables['PATH']}"
    variables.pop("PYTHONPATH", None)
    for command in (["--help"], ["doctor"], ["selftest"], ["bench", "--help"]):
        for program in (
            [str(environment.folder / "bin" / "mlx-lm-kvpersist")],
            [environment.python, "-OO", "-m", "mlx_lm_kvpersist"],
        ):
            done = subprocess.run(
                [*program, *command],
                capture_output=True,
                text=True,
                check=False,
                env=variables,
                cwd=environment.folder,
            )
            assert done.returncode == 0, f"{program} {command}\n{done.stdout}{done.stderr}"


def test_the_server_runs_with_read_only_site_packages(
    environment: Installed, tiny_model: Path, tmp_path: Path
) -> None:
    """Root may write anywhere, so the processes run without that capability."""
    without_override: list[str] = []
    if os.geteuid() == 0:
        bounds = ("-dac_override", "-dac_override")
        without_override = ["setpriv", "--bounding-set", bounds[0], "--inh-caps", bounds[1]]
    # Only folders are changed: the installer's cache may have hard links to the same files.
    folders = [environment.folder, *(p for p in environment.folder.rglob("*") if p.is_dir())]
    folders = [folder for folder in folders if not folder.is_symlink()]
    for folder in folders:
        folder.chmod(0o555)
    try:
        for folder in environment.folder.glob("lib/python*/site-packages"):
            touch = [*without_override, environment.python, "-c", "open('new', 'w')"]
            done = subprocess.run(touch, capture_output=True, text=True, check=False, cwd=folder)
            assert "PermissionError" in done.stderr, "the folder can be written to"
        server = environment.server(tiny_model, tmp_path / "store")
        if without_override:
            server.launcher = (*without_override[1:], server.python, *server.launcher)
            server.python = without_override[0]
        with server:
            reply = chat(server)
            settle(server)
            server.kill9()
            server.start()
            assert_restored(server, reply)
    finally:
        for folder in folders:
            folder.chmod(0o755)


@pytest.fixture(scope="module")
def current_environment(
    wheel: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Installed]:
    """An environment with the Python version of this process."""
    version = "{}.{}".format(*sys.version_info)
    prepared = installed(wheel, version, tmp_path_factory.mktemp("other") / "venv")
    yield prepared
    shutil.rmtree(prepared.folder)


def test_two_environments_share_a_store(
    environment: Installed, current_environment: Installed, tiny_model: Path, tmp_path: Path
) -> None:
    """Both servers run at the same time, with Python 3.10 on two versions of mlx-lm."""
    store = tmp_path / "store"
    with environment.server(tiny_model, store) as server:
        reply = chat(server)
        settle(server)
        with current_environment.server(tiny_model, store) as other_server:
            assert_restored(other_server, reply)
            turn = [*MESSAGES, {"role": "assistant", "content": reply.text}, QUESTION]
            longer = other_server.chat(turn, session="log", temperature=0.0, max_tokens=8)
            assert longer.kvpersist["outcome"] == "EXTEND"
            settle(other_server)
            again = server.chat(turn, session="log", temperature=0.0, max_tokens=8)
            assert again.text == longer.text and again.kvpersist["outcome"] == "EXACT"


def settle(server: ServerProcess) -> None:
    """Wait until nothing was written for half a second: a turn is saved in several steps."""
    previous, since = None, time.monotonic()
    while time.monotonic() < since + 0.5:
        _, _, body = server.request("GET", STATS_PATH)
        store = json.loads(body)["store"]
        now = (store["tiers"]["disk"]["written_bytes"], store["turns_saved"])
        if store["queue"]["tasks"] or now != previous:
            previous, since = now, time.monotonic()
        time.sleep(0.05)


def test_uninstalling_removes_the_plugins_files(environment: Installed) -> None:
    """This test runs last, after servers and commands have written their files."""
    assert any("kvpersist" in path for path in files_of(environment.folder))
    uv("pip", "uninstall", "--quiet", "--python", environment.python, "mlx-lm-kvpersist")
    left = files_of(environment.folder) - environment.before
    files = [path for path in left if (environment.folder / path).is_file()]
    # Other packages keep their compiled files, and installers do not remove files of -OO.
    assert [path for path in files if not path.endswith(".pyc") and path != ".lock"] == []


def test_the_source_distribution_runs_its_tests(tmp_path: Path) -> None:
    """The tests run in a separate environment, without this checkout."""
    uv("build", "--quiet", "--sdist", "--out-dir", tmp_path, REPOSITORY)
    (packed,) = tmp_path.glob("*.tar.gz")
    with tarfile.open(packed) as archive:
        archive.extractall(tmp_path, filter="data")
    folder = tmp_path / packed.name.removesuffix(".tar.gz")
    python = folder / ".venv" / "bin" / "python"
    uv("venv", "--quiet", "--python", sys.executable, folder / ".venv")
    project = f"{folder}{_EXTRA}"
    uv("pip", "install", "--quiet", "--python", python, "-e", project, "--group",
       f"{folder}/pyproject.toml:dev")  # fmt: skip
    done = subprocess.run(
        [python, "-m", "pytest", "-q", "-p", "no:cacheprovider", *SOME_TESTS],
        capture_output=True,
        text=True,
        check=False,
        cwd=folder,
        env={name: value for name, value in os.environ.items() if name != "PYTHONPATH"},
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr
    assert " passed" in done.stdout
