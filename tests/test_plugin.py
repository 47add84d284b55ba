"""The plugin's hooks that no request and no model reaches."""

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


def test_a_request_that_another_plugin_took_is_told_so() -> None:
    plugin = KVPersistPlugin()
    request: Any = SimpleNamespace(messages=[{"role": "user", "content": "hello"}])
    first, again = (plugin.response_headers(request, False) for _ in range(2))
    assert first == again
    headers = dict(first)
    assert headers["X-KVPersist"].startswith("outcome=STOCK; tier=cold; reused=0")
    (record,) = plugin._log.records()
    assert record["id"] == headers["X-KVPersist-Request"]
    assert record["detail"] == "another plugin took it"


def test_a_request_that_waits_is_named_before_its_outcome_is_known() -> None:
    plugin = KVPersistPlugin()
    request: Any = SimpleNamespace(messages=[{"role": "user", "content": "hello"}])
    early, late = (dict(plugin.response_headers(request, is_early)) for is_early in (True, False))
    assert early["X-KVPersist"] == "outcome=PENDING"
    assert late["X-KVPersist"].startswith("outcome=STOCK")
    (record,) = plugin._log.records()
    assert record["id"] == early["X-KVPersist-Request"] == late["X-KVPersist-Request"]


def test_what_fails_over_a_body_costs_a_request_neither_its_tenant_nor_its_wish(
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


def test_kv_bits_are_left_to_stock_where_it_serves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """With --kv-bits stock quantizes, one request at a time; the plugin does so in batches."""
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
        make_all_load(monkeypatch)
        plugin.model_loaded(provider)
        assert args.kv_bits is None
    finally:
        plugin.shutdown()


def make_all_load(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make every model one whose conversations can be stored."""
    model = mock.MagicMock(draft=None)
    model.speed.limits.return_value = PrefillLimits(1.0, lambda position: 8)
    made = {"load_model": model, "Memory": mock.MagicMock(spec=Memory), "described": ""}
    for name, value in made.items():
        replaced = mock.Mock(return_value=value)
        monkeypatch.setattr(f"mlx_lm_kvpersist.plugin.{name}", replaced)


def test_a_model_whose_files_are_gone_is_left_to_stock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Something may delete them between loading and reading them."""
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
    ("rows", "option", "most"), [(1, "auto", 9), (33, "auto", 0), (1, "off", 0)]
)
def test_nothing_is_drafted_if_calls_of_a_few_rows_wait_for_a_kernel(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rows: int, option: str, most: int
) -> None:
    plugin = KVPersistPlugin()
    parser = argparse.ArgumentParser()
    plugin.add_options(parser)
    given = ["--kvpersist-dir", str(tmp_path / "store"), "--kvpersist-draft", option]
    args = parser.parse_args(given, copy.copy(ARGS))
    plugin.configure(args)
    make_all_load(monkeypatch)
    monkeypatch.setattr("mlx_lm_kvpersist.plugin.least_rows", lambda: rows)
    monkeypatch.setattr("mlx_lm_kvpersist.plugin.most_taken_back", lambda caches: 9)
    provider = SimpleNamespace(
        cli_args=args, model_key=("model", None, None), model=nn.Module(), tokenizer=None
    )
    try:
        support = plugin.model_loaded(provider)
        assert support is not None and support.most_taken_back([]) == most
    finally:
        plugin.shutdown()


def test_a_reply_that_was_parked_and_left_lets_go_of_its_blocks() -> None:
    plugin = KVPersistPlugin()
    request: Any = SimpleNamespace()
    closed: list[bool] = []
    lookup: Any = SimpleNamespace(close=lambda: closed.append(True))
    RequestState.of(request).lookup = lookup
    plugin.reply_timed(request=request, times_s=(0.1, 0.2))
    assert closed and RequestState.of(request).stage is Stage.DONE
