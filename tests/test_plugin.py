"""Hooks of the plugin, called without a server."""

from __future__ import annotations

import argparse
import copy
from email.message import Message
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import mlx.nn as nn
import pytest

from mlx_lm_kvpersist.api.session_keys import KEEP_HEADER
from mlx_lm_kvpersist.cache.geometry.precision import PrecisionChoice
from mlx_lm_kvpersist.config import Config
from mlx_lm_kvpersist.host.hooks import PrefillLimits
from mlx_lm_kvpersist.host.patching.probes import ARGS
from mlx_lm_kvpersist.plugin import KVPersistPlugin
from mlx_lm_kvpersist.request.memory import Memory
from mlx_lm_kvpersist.request.serving import RequestState, Stage
from mlx_lm_kvpersist.store.records import StoreLimits


def test_a_request_of_another_plugin_has_the_outcome_stock() -> None:
    plugin = KVPersistPlugin()
    request: Any = SimpleNamespace(messages=[{"role": "user", "content": "hello"}])
    first, again = (plugin.response_headers(request, False) for _ in range(2))
    assert first == again
    headers = dict(first)
    assert headers["X-KVPersist"].startswith("outcome=STOCK; tier=cold; reused=0")
    (record,) = plugin._log.records()
    assert record["id"] == headers["X-KVPersist-Request"]
    assert record["detail"] == "another plugin took it"


def test_early_headers_have_the_request_id_and_a_pending_outcome() -> None:
    plugin = KVPersistPlugin()
    request: Any = SimpleNamespace(messages=[{"role": "user", "content": "hello"}])
    early, late = (dict(plugin.response_headers(request, is_early)) for is_early in (True, False))
    assert early["X-KVPersist"] == "outcome=PENDING"
    assert late["X-KVPersist"].startswith("outcome=STOCK")
    (record,) = plugin._log.records()
    assert record["id"] == early["X-KVPersist-Request"] == late["X-KVPersist-Request"]


def test_namespace_and_keep_header_survive_an_error_in_the_body(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def failing(*args: Any) -> str:
        raise RecursionError

    plugin = KVPersistPlugin()
    plugin._config = Config(tmp_path, StoreLimits(1, 1), PrecisionChoice())
    monkeypatch.setattr("mlx_lm_kvpersist.plugin.session_key", failing)
    headers = Message()
    headers[KEEP_HEADER], headers["X-KVPersist-Namespace"] = "no", "theirs"
    request: Any = SimpleNamespace(messages=[{"role": "user", "content": "hello"}], tools=None)
    with pytest.raises(RecursionError):
        plugin.request_received(request, headers, {})
    state = RequestState.of(request)
    assert (state.namespace, state.is_kept) == ("theirs", False)


def test_kv_bits_apply_only_to_models_that_stock_serves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Stock quantizes with --kv-bits only without batching; the plugin quantizes in batches."""
    caplog.set_level("INFO")
    plugin = KVPersistPlugin()
    parser = argparse.ArgumentParser()
    plugin.add_options(parser)
    given = copy.copy(ARGS)
    given.kv_bits, given.kv_group_size = 8, 64
    args = parser.parse_args(["--kvpersist-dir", str(tmp_path / "store")], given)
    plugin.configure(args)
    assert args.kv_bits is None
    provider = SimpleNamespace(
        cli_args=args, model_key=("model", None, "draft"), model=nn.Module(), tokenizer=None
    )
    try:
        plugin.model_loaded(provider)
        assert args.kv_bits == 8
        assert "--kv-bits 8 applies" in caplog.text
        support_every_model(monkeypatch)
        plugin.model_loaded(provider)
        assert args.kv_bits is None
    finally:
        plugin.shutdown()


def support_every_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the plugin support every model."""
    model = mock.MagicMock(draft=None)
    model.speed.limits.return_value = PrefillLimits(1.0, lambda position: 8)
    made = {"load_model": model, "Memory": mock.MagicMock(spec=Memory), "described": ""}
    for name, value in made.items():
        replaced = mock.Mock(return_value=value)
        monkeypatch.setattr(f"mlx_lm_kvpersist.plugin.{name}", replaced)


def test_a_model_with_deleted_files_is_served_by_stock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The files may be deleted after the model is loaded and before the plugin reads them."""
    plugin = KVPersistPlugin()
    parser = argparse.ArgumentParser()
    plugin.add_options(parser)
    args = parser.parse_args(["--kvpersist-dir", str(tmp_path / "store")], copy.copy(ARGS))
    plugin.configure(args)
    gone = FileNotFoundError(2, "No such file", "model.safetensors")
    monkeypatch.setattr("mlx_lm_kvpersist.plugin.load_model", mock.Mock(side_effect=gone))
    provider = SimpleNamespace(
        cli_args=args, model_key=("model", None, None), model=None, tokenizer=None
    )
    try:
        assert plugin.model_loaded(provider) is None
        assert "served as stock does" in caplog.text and "model.safetensors" in caplog.text
    finally:
        plugin.shutdown()


@pytest.mark.parametrize(
    ("rows", "option", "most_drafted"), [(1, "auto", 9), (33, "auto", 0), (1, "off", 0)]
)
def test_drafts_are_off_by_option_or_for_slow_small_batches(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rows: int, option: str, most_drafted: int
) -> None:
    plugin = KVPersistPlugin()
    parser = argparse.ArgumentParser()
    plugin.add_options(parser)
    given = ["--kvpersist-dir", str(tmp_path / "store"), "--kvpersist-draft", option]
    args = parser.parse_args(given, copy.copy(ARGS))
    plugin.configure(args)
    support_every_model(monkeypatch)
    monkeypatch.setattr("mlx_lm_kvpersist.plugin.least_rows", lambda: rows)
    monkeypatch.setattr("mlx_lm_kvpersist.plugin.most_taken_back", lambda caches: 9)
    provider = SimpleNamespace(
        cli_args=args, model_key=("model", None, None), model=nn.Module(), tokenizer=None
    )
    try:
        support = plugin.model_loaded(provider)
        assert support is not None and support.most_taken_back([]) == most_drafted
    finally:
        plugin.shutdown()


def test_reply_timed_closes_an_open_lookup() -> None:
    plugin = KVPersistPlugin()
    request: Any = SimpleNamespace()
    closed: list[bool] = []
    lookup: Any = SimpleNamespace(close=lambda: closed.append(True))
    RequestState.of(request).lookup = lookup
    plugin.reply_timed(request=request, times_s=(0.1, 0.2))
    assert closed and RequestState.of(request).stage is Stage.DONE
