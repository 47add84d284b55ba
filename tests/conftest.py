"""Fixtures for every test folder: tiny models, made once, and servers that stop after tests."""

from __future__ import annotations

import gc
import os
import shutil
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

from tests.support import ServerProcess, StartServer, make_tiny_model
from tests.support.clock import Clock
from tests.support.host import (  # noqa: F401
    environment,
    patched_server,
    server,
    stock_environment,
)
from tests.support.synthetic.smollm2 import NOT_FETCHED, is_fetched, make_smollm2
from tests.support.zygote import Zygote

# CI always tries the same examples; developers' machines try new examples.
# No deadlines: the time of an example depends more on the machine than on the code.
settings.register_profile("ci", deadline=None, derandomize=True)
settings.register_profile("here", deadline=None)
settings.load_profile("ci" if os.environ.get("CI") else "here")


_SERVER_FOLDERS = {"attack", "packaging", "replay", "server"}
_SERVER_FIXTURES = {"environment", "patched_server", "start_server", "started"}
_LONG_MODULES = {
    *("tests.cache.live.test_schedules", "tests.cli.test_bench", "tests.cli.test_demo"),
    *("tests.cli.test_doctor", "tests.cli.test_selftest", "tests.cli.test_store"),
    *("tests.host.scheduling.test_drafts_over_caches", "tests.host.test_serving"),
    *("tests.host.scheduling.test_generation_thread", "tests.host.test_startup"),
    *("tests.host.scheduling.test_prompt_lookup", "tests.host.scheduling.test_wired"),
    *("tests.models_check.test_build", "tests.models_check.test_facts"),
    *("tests.models_check.test_sweep", "tests.request.test_checkpoints"),
    *("tests.request.test_drafts", "tests.request.test_images", "tests.request.test_look_again"),
    *("tests.request.test_lookup", "tests.request.test_memory_shared"),
    *("tests.request.test_prefetch", "tests.store.test_shared", "tests.test_ranks"),
    *("tests.cli.test_quality", "tests.cache.measuring.test_prefill_memory"),
    *("tests.cli.test_servers", "tests.benchmarks.test_servers", "tests.store.test_lock"),
    *("tests.patches_check.test_installed", "tests.test_round_trip"),
    *("tests.support_test.test_server_process", "tests.support_test.test_zygote"),
    *("tests.cache.geometry.test_on_grid", "tests.cache.live.test_full_precision_batch"),
    *("tests.cache.live.test_newest", "tests.cache.measuring.test_attention_check"),
    *("tests.cli.test_export", "tests.cli.test_sessions", "tests.docs.test_pages"),
    *("tests.cache.live.test_mixed", "tests.request.test_edited_replies"),
    *("tests.store.test_encrypted", "tests.store.test_scale", "tests.test_upstream"),
}
"""Modules that take long, or start processes."""


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Skip modules that `make quick` does not run: importing clients' packages takes seconds."""
    if "not full" not in config.option.markexpr:
        return None
    name = ".".join(collection_path.relative_to(config.rootpath).with_suffix("").parts)
    folders = {f"tests.{folder}" for folder in _SERVER_FOLDERS}
    return name in folders | _LONG_MODULES or None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tests that `make quick` leaves out, and put their modules first.

    A long module at the end would keep one worker busy while the others are idle.
    """
    long_modules = set[str]()
    for item in items:
        fixtures = _SERVER_FIXTURES & set(getattr(item, "fixturenames", ()))
        module = _module_of(item)
        if module.split(".")[1] in _SERVER_FOLDERS or fixtures or module in _LONG_MODULES:
            item.add_marker(pytest.mark.full)
            long_modules.add(module)
    items.sort(key=lambda item: _module_of(item) not in long_modules)


def pytest_collection_finish() -> None:
    """Exclude modules and the list of tests from garbage collection: they stay in memory."""
    gc.collect()
    gc.freeze()


def _module_of(item: pytest.Item) -> str:
    name: str = getattr(item, "module").__name__  # noqa: B009
    return name


@pytest.fixture(scope="session", autouse=True)
def hub_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Servers do not find the models that a user has downloaded."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_HUB_CACHE", str(tmp_path_factory.mktemp("hub")))
        yield


@pytest.fixture(scope="session", autouse=True)
def zygotes(hub_cache: None) -> Iterator[None]:
    """On Linux servers are forked from processes that have imported transformers."""
    ServerProcess.zygotes[sys.executable] = made = (Zygote(), Zygote())
    yield
    del ServerProcess.zygotes[sys.executable]
    for zygote in made:
        zygote.close()


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """A clock that only the test or a sleep advances."""
    made = Clock()
    for name in ("monotonic", "perf_counter", "sleep"):
        monkeypatch.setattr(time, name, getattr(made, name))
    return made


@pytest.fixture(scope="session")
def models_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of this session's models."""
    return tmp_path_factory.mktemp("models")


@pytest.fixture(scope="session")
def tiny_model(models_dir: Path) -> Path:
    """Llama, byte-level tokenizer, ChatML, no begin token."""
    return make_tiny_model(models_dir / "byte-level")


@pytest.fixture(scope="session")
def tiny_model_bos(models_dir: Path) -> Path:
    """Like `tiny_model`, with a begin token in encode() and in the template."""
    return make_tiny_model(models_dir / "byte-level-bos", bos=True)


@pytest.fixture(scope="session")
def tiny_model_spm(models_dir: Path) -> Path:
    """Llama-2's kind of tokenizer: dummy space, byte tokens, `<s>`, [INST]."""
    return make_tiny_model(models_dir / "sentencepiece", tokenizer="sentencepiece", bos=True)


@pytest.fixture(scope="session")
def tiny_model_spm_legacy(models_dir: Path) -> Path:
    """Like `tiny_model_spm`, but each text between special tokens gets a dummy space."""
    path = models_dir / "sentencepiece-legacy"
    return make_tiny_model(path, tokenizer="sentencepiece-legacy", bos=True)


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StartServer]:
    """Start servers that end with the module, for tests whose requests differ."""
    start = StartServer(tmp_path_factory.mktemp("started"))
    try:
        yield start
    finally:
        start.close()


@pytest.fixture(scope="session")
def smollm2(models_dir: Path) -> Iterator[Path]:
    """SmolLM2-135M-Instruct, real weights in float32, for slow tests, which skip without it."""
    if not is_fetched():
        pytest.skip(NOT_FETCHED)
    path = make_smollm2(models_dir / "smollm2")
    yield path
    shutil.rmtree(path)  # 513 MiB; pytest would keep three copies


@pytest.fixture
def start_server(tmp_path: Path) -> Iterator[StartServer]:
    """Start servers that end with the test: start_server(model) or .with_plugin(model)."""
    start = StartServer(tmp_path)
    try:
        yield start
    finally:
        start.close()
