"""Keys name exactly one thing."""

from __future__ import annotations

from dataclasses import replace

from mlx_lm_kvpersist.block import Root, block_key, pack_ids


def test_each_part_of_a_root_tells_it_from_others() -> None:
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
    assert len({one.key for one in roots}) == len(roots)


def test_each_part_of_a_block_tells_it_from_others() -> None:
    blocks = [(b"p", [1, 2]), (b"p", [2, 1]), (b"p", [1]), (b"q", [1, 2]), (b"p", [258])]
    assert len({block_key(parent, pack_ids(ids)) for parent, ids in blocks}) == len(blocks)
