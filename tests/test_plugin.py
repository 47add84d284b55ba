"""What the plugin says of a request whose prompt it never saw."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from mlx_lm_kvpersist.plugin import KVPersistPlugin


def test_a_request_with_images_says_that_it_is_left_to_stock(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """From mlx-lm 0.32.1 the server makes such prompts itself; `prepare_prompt` is not asked."""
    plugin, request = KVPersistPlugin(), SimpleNamespace()
    with caplog.at_level("INFO"):
        first, again = plugin.response_headers(request), plugin.response_headers(request)
    assert first == again
    headers = dict(first)
    assert headers["X-KVPersist"].startswith("outcome=STOCK; tier=cold; reused=0")
    (record,) = plugin._history.records()
    assert record.id == headers["X-KVPersist-Request"]
    assert "images" in record.outcome.detail
    assert caplog.text.count("outcome=STOCK") == 1
