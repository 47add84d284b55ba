"""A tree of blocks in a dictionary, with blocks of any length."""

from __future__ import annotations

from mlx_lm_kvpersist.block import Block, block_key, pack_ids
from mlx_lm_kvpersist.match import TokenText

ROOT = b"root"


class MemoryTree:
    def __init__(self, tokens: TokenText, block_tokens: int) -> None:
        self._tokens = tokens
        self._block_tokens = block_tokens
        self._children: dict[bytes, dict[bytes, Block]] = {}

    def children(
        self, parent: bytes, ahead: str | bytes | None = None, limit: int | None = None
    ) -> list[Block]:
        return list(self._children.get(parent, {}).values())[:limit]

    def add(self, ids: list[int]) -> bytes:
        """Store a chain; return the key of its last block."""
        parent, pending = ROOT, b""
        for start in range(0, len(ids), self._block_tokens):
            block_ids = ids[start : start + self._block_tokens]
            packed = pack_ids(block_ids)
            key = block_key(parent, packed)
            text, pending = self._tokens.feed(block_ids, pending)
            self.add_node(Block(key, parent, start, packed, text, pending))
            parent = key
        return parent

    def add_node(self, node: Block) -> None:
        self._children.setdefault(node.parent, {})[node.key] = node
