from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings
from mlx_lm.tokenizer_utils import load as load_tokenizer

from mlx_lm_kvpersist.match import TokenText
from tests.support.synthetic import train_tokenizer

EXAMPLES = settings(max_examples=40)
"""The number of examples of each property, for each kind of tokenizer."""

KINDS = [
    *("byte-level", "sentencepiece"),
    pytest.param("byte-level-bos", marks=pytest.mark.slow),
    pytest.param("sentencepiece-legacy", marks=pytest.mark.slow),
]
"""Two kinds run by default; the slow tests add two kinds."""


@pytest.fixture(scope="session", params=KINDS)
def tokenizer(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A trained tokenizer of each kind, loaded as in the server."""
    kind = request.param
    path: Path = tmp_path_factory.mktemp(kind)
    train_tokenizer(kind.removesuffix("-bos"), 600, bos=kind != "byte-level").save(path)
    return load_tokenizer(path)


@pytest.fixture(scope="session")
def token_text(tokenizer: Any) -> TokenText:
    text = TokenText.of(tokenizer)
    assert text is not None
    return text
