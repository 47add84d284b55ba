"""Every patch verifies its effect, names what it needs, and can be undone."""

from __future__ import annotations

import importlib
import io
from argparse import Namespace
from functools import wraps
from pathlib import Path
from types import ModuleType
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models.cache import QuantizedKVCache

from mlx_lm_kvpersist.cli.selftest import check_patch
from mlx_lm_kvpersist.errors import (
    PatchNotEffective,
    SelfTestFailed,
    SignatureChanged,
    TargetMissing,
)
from mlx_lm_kvpersist.host import install, manager, uninstall
from mlx_lm_kvpersist.host.patching import probes
from mlx_lm_kvpersist.host.patching.patches import (
    PATCH_SET,
    PATCHES,
    PRIVATE_NAMES,
    SEVERAL_GPUS,
    Overrides,
    Patch,
    PatchSet,
    Uses,
    names_in,
    needed,
)
from mlx_lm_kvpersist.host.patching.probes import batches_follow_plugins
from mlx_lm_kvpersist.host.run import PatchChecks
from tests.support.host import plugged
from tools.measures import private_names

from ..plugins import Echo

PACKAGE = Path(manager.__file__ or "").parents[1]

each_patch = pytest.mark.parametrize("patch", PATCHES, ids=lambda patch: patch.name)


def test_the_table_names_every_private_name_of_mlx_lm(server: ModuleType) -> None:
    """There are at most 20 names; each has a probe that runs when the server starts."""
    folders = PACKAGE, Path(server.__file__ or "").parent
    ours, theirs = ("\n".join(p.read_text() for p in at.rglob("*.py")) for at in folders)
    listed = {name.rpartition(".")[2] for name in PRIVATE_NAMES}
    assert private_names(ours, theirs) - {"_tokenizer"} == listed and len(listed) <= 20
    run = {patch.verify.__name__ for patch in PATCHES} | names_in(batches_follow_plugins.__code__)
    assert {probe.__name__ for probe in PRIVATE_NAMES.values()} <= run


def test_probe_fails_if_items_of_stocks_queue_get_another_field(
    server: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    insert = server.BatchGenerator.insert_segments

    @wraps(insert)
    def insert_longer(self: Any, *args: Any, **kwargs: Any) -> Any:
        uids, queue = insert(self, *args, **kwargs), self._unprocessed_sequences
        queue.extend([(*queue.popleft(), None) for _ in range(len(queue))])
        return uids

    (patch,) = (patch for patch in PATCHES if patch.name == "batch_generator")
    monkeypatch.setattr(server.BatchGenerator, "insert_segments", insert_longer)
    applied = PatchSet()
    applied.apply([patch])
    try:
        with pytest.raises(PatchNotEffective, match="positional arguments"):
            patch.check()
    finally:
        applied.undo()


def test_probe_fails_if_a_batch_changes_its_lists_in_place(
    server: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A parked row is a copy of its batch, whose lists it must not share."""

    def filter_in_place(batch: Any, keep: list[int]) -> None:
        batch.uids[:] = [batch.uids[place] for place in keep]

    probes.rows_are_parked(server)
    generate: Any = importlib.import_module("mlx_lm.generate")
    monkeypatch.setattr(generate.GenerationBatch, "filter", filter_in_place)
    with pytest.raises(PatchNotEffective, match="lists of the batch"):
        probes.rows_are_parked(server)


@each_patch
def test_probe_fails_on_the_unpatched_host(patch: Patch, server: ModuleType) -> None:
    # "has no effect", not "could not be verified": the probe saw a stock server work.
    with pytest.raises(PatchNotEffective, match="has no effect"):
        patch.check()


@each_patch
def test_probe_passes_with_its_patch_alone_and_fails_after_undo(
    patch: Patch, server: ModuleType
) -> None:
    stock = getattr(patch.module, patch.attribute)
    applied = PatchSet()
    applied.apply([patch])
    try:
        assert getattr(patch.module, patch.attribute) is not stock
        patch.check()
    finally:
        applied.undo()
    assert getattr(patch.module, patch.attribute) is stock
    with pytest.raises(PatchNotEffective, match="has no effect"):
        patch.check()


@each_patch
def test_probe_passes_with_all_patches_and_calls_no_plugin(
    patch: Patch, patched_server: ModuleType
) -> None:
    echo = Echo()
    with plugged(echo):
        patch.check()
    assert echo.calls == []


def add_processor(value: Any) -> Any:
    """Add another package's processor to the logits processors of all rows, or of one row."""

    def shifted(tokens: Any, logits: Any) -> Any:
        return mx.roll(logits, 1, -1)

    rows = value or []
    if any(isinstance(row, list | tuple) for row in rows):
        return [[*row, shifted] for row in rows]
    return [*rows, shifted]


@pytest.mark.parametrize(
    ("module", "name", "wrap"),
    [
        ("server", "_make_logits_processors", "result"),
        ("server", "make_logits_processors", "result"),
        ("server", "stream_generate", "argument"),
        ("generate", "BatchGenerator.__init__", "attribute"),
        ("generate", "PromptProcessingBatch.__init__", "attribute"),
        ("generate", "GenerationBatch.__init__", "attribute"),
    ],
)
def test_probes_pass_beside_a_package_that_adds_logits_processors(
    module: str, name: str, wrap: str, server: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    owner, _, attribute = name.rpartition(".")
    host: Any = importlib.import_module(f"mlx_lm.{module}")
    host = getattr(host, owner) if owner else host
    stock = getattr(host, attribute)
    calls: list[str] = []

    @wraps(stock)
    def added(*args: Any, **kwargs: Any) -> Any:
        calls.append(name)
        if wrap == "argument":
            kwargs["logits_processors"] = add_processor(kwargs.get("logits_processors"))
        result = stock(*args, **kwargs)
        if wrap == "attribute":
            # A batch has a list of processors for each row, a generator one list for all.
            rows = args[0].logits_processors
            rows = rows or [[] for _ in getattr(args[0], "uids", ())]
            args[0].logits_processors = add_processor(rows)
        return add_processor(result) if wrap == "result" else result

    monkeypatch.setattr(host, attribute, added)
    PATCH_SET.apply(PATCHES)
    try:
        for patch in PATCHES:
            patch.check()
    finally:
        PATCH_SET.undo()
    assert calls or module == "server"  # no probe makes logits processors for a request


@each_patch
def test_missing_target_is_named_and_nothing_stays_patched(
    patch: Patch, server: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = dict(vars(server))
    with monkeypatch.context() as changes:
        changes.delattr(patch.module, patch.attribute)
        with pytest.raises(TargetMissing, match=patch.attribute):
            PATCH_SET.apply(PATCHES)
        assert not PATCH_SET.is_applied
    assert vars(server) == before


@pytest.mark.parametrize(
    ("patch", "name"),
    [
        (patch, f"{expected.name}.{method}")
        for patch in PATCHES
        for expected in patch.expect
        if isinstance(expected, Overrides)
        for method in expected.methods
    ],
    ids=lambda value: value if isinstance(value, str) else value.name,
)
def test_changed_signature_is_named(
    patch: Patch, name: str, server: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    owner, _, method = name.partition(".")

    def changed(self: Any, surprise: int) -> None: ...

    monkeypatch.setattr(getattr(server, owner), method, changed)
    with pytest.raises(SignatureChanged, match=r"surprise: .*expected \(.*update") as caught:
        patch.check_host()
    assert name in str(caught.value)
    with pytest.raises(SignatureChanged):
        PATCH_SET.apply(PATCHES)
    assert not PATCH_SET.is_applied


@pytest.mark.parametrize(
    ("patch", "expectation"),
    [(patch, e) for patch in PATCHES for e in patch.expect if isinstance(e, Uses)],
    ids=lambda value: f"{value.name}-{value.uses}" if isinstance(value, Uses) else value.name,
)
def test_global_that_the_host_no_longer_uses_raises_signature_changed(
    patch: Patch, expectation: Uses, server: ModuleType
) -> None:
    expectation.check(patch.module)
    with pytest.raises(SignatureChanged, match="no longer uses"):
        Uses(expectation.name, "not_" + expectation.uses).check(patch.module)


def test_failed_patch_undoes_the_patches_before_it(
    server: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(stock: Any) -> Any:
        raise RuntimeError("cannot be replaced")

    last = PATCHES[-1]
    broken = Patch(last.name, last.target, last.why, last.expect, refuse, last.verify)
    before = dict(vars(server))
    with pytest.raises(RuntimeError, match="cannot be replaced"):
        PATCH_SET.apply((*PATCHES[:-1], broken))
    assert vars(server) == before
    assert not PATCH_SET.is_applied


def test_two_patches_of_one_target_are_undone(server: ModuleType) -> None:
    stock = server.convert_chat
    given: Any = {"target": "mlx_lm.server:convert_chat", "why": "", "expect": ()}
    twice = [Patch(name, replace=lambda below: [below], verify=print, **given) for name in "ab"]
    patches = PatchSet()
    patches.apply(twice)
    assert server.convert_chat == [[stock]]
    patches.undo()
    assert server.convert_chat is stock


def test_probe_fails_if_a_method_requires_another_argument(
    server: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    patch = next(patch for patch in PATCHES if patch.name == "response_generator")

    def changed(self: Any, *given: Any) -> Any:
        raise TypeError("missing 1 required positional argument")

    monkeypatch.setattr(server.ResponseGenerator, "_tokenize", changed)
    applied = PatchSet()
    monkeypatch.setattr(Patch, "check_host", lambda patch: None)
    applied.apply([patch])
    try:
        with pytest.raises(PatchNotEffective, match="could not be verified"):
            patch.check()
    finally:
        applied.undo()


def test_patches_change_only_their_targets_until_they_are_undone(server: ModuleType) -> None:
    """The process may use mlx_lm for other work, which must not change."""
    names = ("mlx_lm", "mlx_lm.models.cache", "mlx_lm.generate", "mlx_lm.utils", "argparse")
    modules = [importlib.import_module(name) for name in names]
    # Python adds these at their first use.
    lazy = {"__annotations__", "__slotnames__", "__warningregistry__"}

    def content(of: Any) -> dict[str, Any]:
        return {name: value for name, value in vars(of).items() if name not in lazy}

    before = [content(module) for module in modules]
    stock = {
        cls: content(cls)
        for cls in vars(server).values()
        if isinstance(cls, type) and cls.__module__.startswith("mlx_lm")
    }
    server_before = content(server)
    PATCH_SET.apply(PATCHES)
    try:
        changed = {k for k, v in content(server).items() if server_before.get(k) is not v}
        assert changed == {patch.attribute for patch in PATCHES if patch.module is server}
        for patch in PATCHES:
            patch.check()
        assert [content(module) for module in modules] == before
        assert {cls: content(cls) for cls in stock} == stock
    finally:
        PATCH_SET.undo()
    assert content(server) == server_before


def test_attention_and_the_wired_limit_are_the_only_changes_outside_the_server(
    server: ModuleType,
) -> None:
    outside = {patch.module: patch for patch in PATCHES if patch.module is not server}
    before = {module: dict(vars(module)) for module in outside}
    PATCH_SET.apply(PATCHES)
    try:
        for module, old in before.items():
            changed = {k for k, v in vars(module).items() if old.get(k) is not v}
            assert changed == {outside[module].attribute}
    finally:
        PATCH_SET.undo()
    assert {patch.name for patch in outside.values()} == {"attention", "wired_limit"}
    assert {module: vars(module) for module in outside} == before


def test_attention_over_stocks_quantized_keys_calls_stock_once(server: ModuleType) -> None:
    patch = next(patch for patch in PATCHES if patch.name == "attention")
    calls: list[tuple[Any, ...]] = []

    def stock(*args: Any, **kwargs: Any) -> str:
        calls.append((args, kwargs))
        return "stock's"

    attention = patch.replace(stock)
    keys = QuantizedKVCache(group_size=32, bits=4).update_and_fetch(
        mx.ones((1, 1, 2, 32)), mx.ones((1, 1, 2, 32))
    )
    assert attention("queries", *keys, scale=2.0, mask=None, group_size=32, bits=4) == "stock's"
    assert calls == [(("queries", *keys, 2.0, None), {"group_size": 32, "bits": 4})]


def test_install_twice_patches_once(server: ModuleType) -> None:
    install([])
    try:
        patched = server.run
        install([])
        assert server.run is patched
    finally:
        uninstall()
    assert server.run is not patched


def test_patches_are_probed_after_plugins_are_configured(patched_server: ModuleType) -> None:
    echo, args = Echo(), Namespace(echo_file=None, plugin=[])
    with plugged(PatchChecks([patch.check for patch in PATCHES]), echo):
        manager.ask("configure", args=args)
        assert echo.calls == [["configure", []]]
        PATCH_SET.undo()
        with pytest.raises(PatchNotEffective):
            manager.ask("configure", args=args)
        assert len(echo.calls) == 2
        PATCH_SET.apply(PATCHES)


def test_selftest_refuses_a_probe_that_cannot_fail(server: ModuleType) -> None:
    patch = PATCHES[0]
    blind = Patch(
        patch.name, patch.target, patch.why, patch.expect, patch.replace, lambda server: None
    )
    with pytest.raises(SelfTestFailed, match="proves nothing"):
        check_patch(blind)


def test_clear_cache_is_patched_only_with_several_gpus(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(mx, "device_count", lambda kind: 1)
    assert SEVERAL_GPUS not in needed()
    monkeypatch.setattr(mx, "device_count", lambda kind: 2)
    assert SEVERAL_GPUS in needed()


def test_clear_cache_returns_the_thread_to_its_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """In this simulation, clearing leaves the thread's GPU, and an operation returns to it."""
    place = ["first"]
    stock_eval = mx.eval

    def evaluate(*args: Any) -> None:
        stock_eval(*args)
        place.append("first")

    monkeypatch.setattr(mx, "clear_cache", lambda: place.append("last"))
    monkeypatch.setattr(mx, "eval", evaluate)
    applied = PatchSet()
    applied.apply([SEVERAL_GPUS])
    try:
        mx.clear_cache()
    finally:
        applied.undo()
    assert place == ["first", "last", "first"]


def test_probe_fails_if_the_buffers_of_a_gpu_cannot_be_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    SEVERAL_GPUS.check()

    def failing(*args: Any) -> None:
        raise RuntimeError("cudaMemcpy(data, buf.data, buf.size, kind) failed: invalid argument")

    monkeypatch.setattr(mx, "array", failing)
    with pytest.raises(PatchNotEffective, match=r"has no effect.*invalid argument"):
        SEVERAL_GPUS.check()


def test_model_of_the_probes_indexes_no_array_by_another() -> None:
    """On a GPU's first start, MLX would compile a kernel for each dtype of the arrays."""
    graph = io.StringIO()
    mx.export_to_dot(graph, probes.next_id(mx.array([[7, 1]]), None))
    assert '"Remainder"' in graph.getvalue()
    assert "Gather" not in graph.getvalue() and "Scatter" not in graph.getvalue()
