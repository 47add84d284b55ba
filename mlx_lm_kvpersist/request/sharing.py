"""Fetch the blocks that a prompt needs from the shared tier into RAM before it is queued."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from itertools import takewhile

from ..block import BLOCK_TOKENS, Block, Checkpoint, Record, Root, pack_ids
from ..cache.geometry.spec import forms_bytes
from ..host.hooks import Prompt
from ..match import match_prompt
from ..store.block_store import BlockStore, Commit
from ..store.shared import Plan, Wanted
from ..store.shared_objects import Conversation
from .lookup import Lookup
from .model import LoadedModel
from .replies import retokenize

_MORE_BYTES = 1 << 20


class _Source:
    """A conversation's blocks and checkpoints, as a source of a match and of a restore point."""

    def __init__(self, conversation: Conversation) -> None:
        self._children = {block.parent: [block] for block in conversation.chain}
        self._checkpoints: dict[bytes, list[Checkpoint]] = {}
        for checkpoint in conversation.checkpoints:
            self._checkpoints.setdefault(checkpoint.block, []).append(checkpoint)

    def children(
        self, parent: bytes, ahead: str | bytes | None = None, limit: int | None = None
    ) -> Sequence[Block]:
        return self._children.get(parent, ())

    def checkpoints(self, blocks: Sequence[bytes]) -> Mapping[bytes, Sequence[Checkpoint]]:
        return {key: self._checkpoints[key] for key in blocks if key in self._checkpoints}


def fetch_ahead(prompt: Prompt, root: Root, store: BlockStore, model: LoadedModel) -> str:
    """Fetch a prompt's blocks if that saves time; return a sentence about it. HTTP thread."""
    assert store.shared is not None
    wanted = _wanted(prompt, root, store, model)
    if len(wanted.ids) - wanted.n_tokens <= BLOCK_TOKENS:
        return ""
    return store.shared.fetch(wanted)


def _wanted(prompt: Prompt, root: Root, store: BlockStore, model: LoadedModel) -> Wanted:
    spec = model.spec
    with store.index.database.lent():
        stored = Lookup(retokenize(prompt, root, store, model), root, store, model).stored
        point = model.saver.find(stored.match.path, stored.n_tokens, store)
    n_here = point.n_tokens if point else 0
    is_here = takewhile(lambda block: block.stop <= n_here, stored.match.path)
    chain = [block for block in is_here if block.n_tokens == BLOCK_TOKENS or not spec.any_prefix]

    def learn(replies: Mapping[bytes, bytes]) -> Wanted:
        remembered = store.replies(root.key, list(replies))
        if new := {digest: ids for digest, ids in replies.items() if digest not in remembered}:
            store.commit(Commit(root, (), replies=new), [])
            return _wanted(prompt, root, store, model)
        return wanted

    arrays_bytes = forms_bytes(spec.block_arrays(BLOCK_TOKENS)) + spec.bytes_per_checkpoint
    wanted = Wanted(
        root,
        stored.prompt.ids,
        prompt.messages,
        chain,
        partial(_plan, stored.prompt, root, n_here, store, model),
        model.speed.compute_s,
        learn,
        2 * arrays_bytes + _MORE_BYTES,
        spec.any_prefix,
    )
    return wanted


def _plan(
    prompt: Prompt,
    root: Root,
    n_here: int,
    store: BlockStore,
    model: LoadedModel,
    conversation: Conversation,
) -> Plan:
    source, packed, tokens = _Source(conversation), pack_ids(prompt.ids), model.text
    text = tokens.known_text(prompt.ids) if tokens else None
    if tokens is None or text is None:
        matched = match_prompt(source, root.key, packed)
    else:
        matched = match_prompt(source, root.key, text, tokens, packed)
    path = list(matched.path)
    point = model.saver.find(path, matched.n_tokens, source) if path else None
    if point is None or point.n_tokens <= n_here:
        return Plan()
    if model.spec.any_prefix:
        path = [block for block in path if block.start < point.n_tokens]
    # Otherwise the blocks after the checkpoint are fetched too: they have the ids of the reply.
    needed: list[tuple[Record, int]]
    needed = [(block, forms_bytes(model.spec.block_arrays(block.n_tokens))) for block in path]
    needed += [(need.record, need.n_bytes) for need in point.needed if need.record not in path]
    return Plan(path, [item for item in needed if item[0].key not in store], point.n_tokens)
