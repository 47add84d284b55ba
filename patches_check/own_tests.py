"""mlx-lm's own tests of its server, its generator and its prompt cache, with our changes in place.

The tests come from the source distribution of each version on PyPI. They load one model of the hub,
which a tiny model replaces. The tests run twice: over stock's caches, and over the plugin's
quantized caches in the default precision. Tests that need the words of the real model, or that
check what the plugin changes, are left out by name.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
import tempfile
import time
from pathlib import Path

import mlx.core as mx

from tests.support import make_tiny_model

from .matrix import REPOSITORY, RowFailed, python_with, uv

VERSIONS = ("0.31.3", "0.32.2")
MODULES = ("test_server.py", "test_generate.py", "test_prompt_cache.py")
MODEL = "mlx-community/Qwen1.5-0.5B-Chat-4bit"
LEFT_OUT = {
    "test_server.py::TestLRUPromptCache::test_lru": "A fetch that leaves no token to compute ends "
    "the generation thread, so our fetch leaves one token.",
    "test_server.py::TestLRUPromptCache::test_insert_empty_tokens_does_not_self_destruct": "For "
    "the same reason, an empty prompt finds nothing.",
    "test_server.py::TestGenerationThreadDeath": "Our server ends when its generation thread has "
    "ended, and tells its clients. Stock's server answers 404.",
    "test_server.py::TestModelSwapClearsCache": "The test's model is a mock, whose bytes "
    "cannot be counted.",
    "test_generate.py::TestGenerate::test_generate_with_logit_bias": "The test names a token "
    "of the real model.",
    "test_generate.py::TestGenerate::test_stream_generate_input_embeddings": "The test "
    "needs a model that follows instructions.",
    "test_generate.py::TestGenerate::test_stream_generate_input_embeddings_prefill": "For the "
    "same reason.",
}
"""Tests that cannot pass, and why. No other test may fail."""
QUANTIZED = {
    "test_server.py::TestServerKVCacheQuantization::test_completion_quantizes_the_cache": "The "
    "conversation is in the plugin's store, not in stock's prompt cache.",
    "test_prompt_cache.py::TestPromptCache::test_cache_to_quantized": "The plugin's caches are "
    "quantized from the start and cannot be quantized again.",
}
"""Further tests that cannot pass with the plugin's caches, and why."""
FAIL_IN_STOCK = {
    "0.31.3": (
        "test_generate.py::TestGenerate::test_batch_continued_generation_ssm",
        "test_generate.py::TestGenerate::test_generate_with_processor",
    )
}
"""Further tests, by version, that fail with this model and MLX even without our changes."""
_TESTS_S = 600.0


def run() -> list[str]:
    """Run the tests with each version; return a line for each failure."""
    failures = []
    with tempfile.TemporaryDirectory(prefix="own-tests-") as temporary:
        folder = Path(temporary)
        hub = stand_in(folder / "hub")
        for version in VERSIONS:
            try:
                python, tests = _prepare(version, folder / version)
                for caches in ("stock", "quantized"):
                    start = time.monotonic()
                    outcome = _run(version, caches, python, tests, hub)
                    duration_s = time.monotonic() - start
                    row = f"mlx-lm {version}, {caches} caches"
                    print(f"{row}: {outcome} ({duration_s:.0f} s)", flush=True)
            except RowFailed as error:
                failures.append(f"mlx-lm {version}: {error}")
    return failures


def _prepare(version: str, folder: Path) -> tuple[Path, Path]:
    """Return an environment's Python, and the folder of the version's tests."""
    python = python_with(version, folder)
    if python != Path(sys.executable):
        uv("pip", "install", "--quiet", "--python", python, "pytest", "requests")
    return python, own_tests(version, folder / "source")


def _run(version: str, caches: str, python: Path, tests: Path, hub: Path) -> str:
    """Return pytest's last line."""
    left_out = [*LEFT_OUT, *FAIL_IN_STOCK.get(version, ())]
    if caches == "quantized":
        left_out += QUANTIZED
    command = [python, "-m", "pytest", "-q", "-c", os.devnull, "--rootdir", tests]
    command += ["-p", "patches_check.in_place", "-p", "no:cacheprovider"]
    for name in left_out:
        command += ["--deselect", name]
    variables = {"HF_HUB_CACHE": str(hub), "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(REPOSITORY)}
    variables["KVPERSIST_CACHES"] = caches
    try:
        done = subprocess.run(
            [*map(str, command), *MODULES],
            capture_output=True,
            text=True,
            check=False,
            cwd=tests,
            env={**os.environ, **variables},
            timeout=_TESTS_S,
        )
    except subprocess.TimeoutExpired:
        raise RowFailed(f"its tests did not end within {_TESTS_S:.0f} s") from None
    if done.returncode:
        output = f"{done.stdout[-8000:]}\n{done.stderr[-2000:]}"
        raise RowFailed(f"its own tests fail over {caches} caches:\n{output}")
    return done.stdout.strip().splitlines()[-1]


def own_tests(version: str, folder: Path) -> Path:
    """Download the source distribution of a version; return the folder of its tests."""
    package = f"mlx-lm=={version}"
    uv("tool", "run", "--quiet", "pip", "download", "--quiet", "--no-deps", "--no-binary", "mlx-lm",
       "--dest", folder, package)  # fmt: skip
    (archive,) = folder.glob("*.tar.gz")
    with tarfile.open(archive) as source:
        # Only the tests: otherwise the package here would hide the installed package.
        tests = [one for one in source.getmembers() if one.name.split("/")[1:2] == ["tests"]]
        source.extractall(folder, tests, filter="data")
    return folder / archive.name.removesuffix(".tar.gz") / "tests"


def stand_in(hub: Path) -> Path:
    """Write a tiny model into the cache folder `hub`, under the name of `MODEL`."""
    repository = hub / f"models--{MODEL.replace('/', '--')}"
    folder = repository / "snapshots" / "tiny"
    # The same model for each run: some tests compare logits with a relative tolerance.
    mx.random.seed(0)
    # 64 dimensions a head: some tests quantize the caches.
    make_tiny_model(folder, model_type="qwen2", n_heads=4, n_kv_heads=4, hidden_size=256)
    # Stock lists only models that have this file.
    (folder / "model.safetensors.index.json").write_text("{}", encoding="utf-8")
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("tiny", encoding="utf-8")
    return hub
