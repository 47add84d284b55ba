"""Conversations without a model: render, retokenize, match, and remember what a test replies."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from mlx_lm.server import process_message_content

from mlx_lm_kvpersist.block import Root, pack_ids
from mlx_lm_kvpersist.host.hooks import Prompt
from mlx_lm_kvpersist.match import TokenText, match_prompt, splice
from mlx_lm_kvpersist.request.model import LoadedModel
from mlx_lm_kvpersist.request.replies import remember, retokenize
from mlx_lm_kvpersist.store.block_store import BlockStore
from tests.match.tree_in_memory import ROOT, MemoryTree

from .wire import Message, sent_for


@dataclass(frozen=True)
class ChatTurn:
    rendered: list[int]
    fed: list[int]
    n_reused: int
    n_reused_by_ids: int
    """How many of the fed ids are stored, compared by ids."""
    n_agreed: int
    """Characters of the prompt that are stored."""
    reply: list[int]
    message: Message
    computed: list[int]
    """The ids that would be fed if only the ids of replies were stored."""

    @property
    def n_total(self) -> int:
        return len(self.fed) + len(self.reply)


class Chat:
    """One tree and one root of replies, with a tokenizer and its template."""

    def __init__(
        self,
        tokenizer: Any,
        store: BlockStore,
        name: str,
        tokens: TokenText | None = None,
        block_tokens: int = 256,
        **template_args: Any,
    ) -> None:
        tokens = tokens or TokenText.of(tokenizer)
        assert tokens is not None
        nothing: Any = None
        self.tokenizer, self.tokens = tokenizer, tokens
        self.template_args = template_args
        self._store, self.root = store, Root(name, "none")
        self.loaded = LoadedModel(nothing, tokenizer, nothing, name, tokens)
        self.tree = MemoryTree(tokens, block_tokens)

    def encode(self, text: str) -> list[int]:
        return self.loaded.encode(text)

    def render(self, messages: Sequence[Message]) -> list[int]:
        messages = copy.deepcopy(list(messages))
        process_message_content(messages)
        ids: list[int] = self.tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, **self.template_args
        )
        return ids

    def turn(
        self,
        messages: Sequence[Message],
        reply: Sequence[int],
        *,
        finish_reason: str = "stop",
        stop_words: Sequence[str] = (),
    ) -> ChatTurn:
        """`reply`: the ids that the model produces, with its end token."""
        rendered = self.render(messages)
        prompt = Prompt(rendered, [rendered], ["user"], messages)
        ids = computed = list(retokenize(prompt, self.root, self._store, self.loaded).ids)
        text = self.tokens.decode(ids)
        match = match_prompt(self.tree, ROOT, text, self.tokens, pack_ids(ids))
        spliced = splice(ids, text, match, self.tokens, self.encode) if match.n_tokens else None
        if spliced is not None:
            ids = spliced.ids
        message = sent_for(
            self.tokenizer,
            rendered,  # the server needs it to see whether the prompt ends inside of thinking
            reply,
            finish_reason,
            stop_words,
            self.template_args.get("tools"),
        )
        remember(messages, ids, reply, message, self.root, self._store, self.loaded)
        by_ids = match_prompt(self.tree, ROOT, pack_ids(ids))
        self.tree.add([*ids, *reply])
        n_reused = spliced.n_stored if spliced is not None else 0
        return ChatTurn(
            rendered,
            ids,
            n_reused,
            by_ids.n_tokens,
            match.n_agreed,
            list(reply),
            message,
            computed,
        )
