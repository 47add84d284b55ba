"""Whoever looks for an exception looks at the tree that opens errors.py."""

from __future__ import annotations

from mlx_lm_kvpersist import errors


def test_the_tree_has_every_exception() -> None:
    classes = [name for name, one in vars(errors).items() if isinstance(one, type)]
    assert [name for name in classes if name not in (errors.__doc__ or "")] == []
