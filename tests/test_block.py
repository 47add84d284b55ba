"""Different roots and different blocks have different keys."""

from __future__ import annotations

from dataclasses import replace

from mlx_lm_kvpersist.block import Root, block_key, pack_ids


def test_each_field_of_a_root_changes_its_key() -> None:
    root = Root("fingerprint", "4b64")
    roots = [
        root,
        replace(root, fingerprint="other"),
        replace(root, layout="8b64"),
        replace(root, with_text=False),
        replace(root, namespace="tenant"),
        replace(root, session="tenant"),
        replace(root, namespace="a", session="b"),
        replace(root, namespace="ab"),
        replace(root, namespace="b", session="a"),
    ]
    assert len({root.key for root in roots}) == len(roots)


def test_parent_and_ids_change_the_key_of_a_block() -> None:
    blocks = [(b"p", [1, 2]), (b"p", [2, 1]), (b"p", [1]), (b"q", [1, 2]), (b"p", [258])]
    assert len({block_key(parent, pack_ids(ids)) for parent, ids in blocks}) == len(blocks)
