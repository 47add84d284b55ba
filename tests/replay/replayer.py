"""Replay conversations through the plugin's hooks, in the order in which the server calls them.

HTTP and sampling are left out: a test says what the model replies. The rest is real: session
keys, normalisation, the chat template, the host's mixins over stock's own classes, the store.
"""

from __future__ import annotations

import copy
import json
from argparse import ArgumentParser
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from email.message import Message as Headers
from itertools import accumulate
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar
from unittest import mock

import mlx.core as mx
from mlx_lm import server
from mlx_lm.models.cache import LRUPromptCache
from mlx_lm.utils import load

from mlx_lm_kvpersist.cache.blocks import BLOCK_TOKENS
from mlx_lm_kvpersist.host import manager
from mlx_lm_kvpersist.host.history import Templates
from mlx_lm_kvpersist.host.hooks import ClientRequest
from mlx_lm_kvpersist.host.patching.probes import GENERATION_ARGS
from mlx_lm_kvpersist.host.scheduling.model_provider import PluginPromptCache
from mlx_lm_kvpersist.host.scheduling.response_generator import PluginResponseGenerator
from mlx_lm_kvpersist.match import common_prefix
from mlx_lm_kvpersist.plugin import KVPersistPlugin
from mlx_lm_kvpersist.request import serving
from mlx_lm_kvpersist.request.outcome import Kind
from mlx_lm_kvpersist.request.serving import RequestState
from tests.support.synthetic.tokenizer import token_bytes

Message = dict[str, Any]

LOGIT_TOLERANCE = 2e-3
"""For logits of size 10, float32, 2 layers: another order of summation changes quantized KV."""
MOST_FIRSTS = 32
"""The number of first prompts whose caches are kept."""

_ResponseGenerator: Any = type("_", (PluginResponseGenerator, server.ResponseGenerator), {})
_PromptCache: Any = type("_", (PluginPromptCache, LRUPromptCache), {})


@dataclass
class Request:
    """The fields of the server's CompletionRequest, on every version."""

    messages: list[Message]
    tools: list[Any] | None
    request_type: str = "chat"
    prompt: str = ""
    role_mapping: None = None


@dataclass(frozen=True)
class Turn:
    """The result of a request: `ids` are prompt and reply, `message` is the client's."""

    kind: Kind
    n_prompt: int
    n_reused: int
    ids: list[int]
    message: Message

    @property
    def n_total(self) -> int:
        return len(self.ids)

    @property
    def prompt(self) -> list[int]:
        return self.ids[: self.n_prompt]


class Replayer:
    """A plugin with a model. Byte-level tokenizers only: each token has its bytes."""

    _firsts: ClassVar[dict[tuple[Any, ...], tuple[list[Any], mx.array]]] = {}
    """The caches and the logits of first prompts, by model, options and ids: tests share them.

    No part of them was ever restored.
    """

    def __init__(self, model_path: Path, folder: Path, *options: str) -> None:
        self.model, self.tokenizer = load(str(model_path))
        self.stored: list[list[int]] = []
        """Every saved sequence, by its ids."""
        self.prompt_ends: set[int] = set()
        """The ends of prompts' segments, at which the server saves a prompt."""
        self._n_turns = 0
        self._options = (
            *("--kvpersist-dir", str(folder), "--kvpersist-disk", "1G"),
            *options,
        )
        self._key = (str(model_path), None, None)
        self._provider = SimpleNamespace(
            model=self.model,
            tokenizer=self.tokenizer,
            processor=None,
            reads_images=False,
            max_context=None,
            model_key=self._key,
            cli_args=SimpleNamespace(chat_template_args={}),
        )
        self._generator = _ResponseGenerator.__new__(_ResponseGenerator)
        self._generator.model_provider = self._provider
        self._generator._templates = Templates()
        self._cache = _PromptCache()
        backend = self.tokenizer._tokenizer.backend_tokenizer
        added = {
            i: token.content.encode() for i, token in backend.get_added_tokens_decoder().items()
        }
        self._pieces = [
            added[i] if i in added else token_bytes(backend, i)
            for i in range(backend.get_vocab_size())
        ]
        self.open()

    def open(self) -> None:
        """Start the plugin on the folder's store, with the model loaded."""
        self._plugin = KVPersistPlugin()
        parser = ArgumentParser()
        self._plugin.add_options(parser)
        args = parser.parse_args(self._options)
        args.chat_template_args = {}
        self._plugin.configure(args)
        support = self._plugin.model_loaded(self._provider)
        assert support is not None
        self._make_caches = support.make_caches
        self._computed: tuple[list[int], list[Any]] = ([], [])
        """The last prompt and its caches, no part of which was ever restored."""
        self._manager = manager.PluginManager()
        self._manager.register(self._plugin)

    def close(self) -> None:
        """End as the server does at SIGTERM."""
        self._plugin.shutdown()

    def restart(self) -> None:
        """End, and begin again with the store on disk."""
        self.close()
        self.open()

    def encode(self, text: str) -> list[int]:
        ids: list[int] = self.tokenizer.encode(text, add_special_tokens=False)
        return ids

    def bytes_of(self, ids: Sequence[int]) -> bytes:
        return b"".join(self._pieces[i] for i in ids)

    def n_common(self, ids: Sequence[int], prompt: bytes) -> int:
        """Return how many of the first `ids` are, as bytes, the beginning of `prompt`.

        The cut is at a token's end and at a character's end.
        """
        ends = [0, *accumulate(len(self._pieces[i]) for i in ids)]
        text = self.bytes_of(ids)
        n_tokens = bisect_right(ends, common_prefix(text, prompt, 0)) - 1
        while 0x80 <= ord(text[ends[n_tokens] :][:1] or b" ") < 0xC0:
            n_tokens -= 1
        return n_tokens

    def n_reusable(self, ids: Sequence[int], prompt: bytes) -> int:
        """Return how many of the first `ids` can stand for the beginning of `prompt`.

        All of them can. Fewer must end with a token that the prompt alone has there, too: the rest
        is then spelled as it would be without them.
        """
        n_tokens = self.n_common(ids, prompt)
        if n_tokens == len(ids):
            return n_tokens
        alone = self.encode(prompt.decode())
        token_at = dict(zip(accumulate(len(self._pieces[i]) for i in alone), alone, strict=True))
        ends = list(accumulate(len(self._pieces[i]) for i in ids[:n_tokens]))
        while n_tokens and token_at.get(ends[n_tokens - 1]) != ids[n_tokens - 1]:
            n_tokens -= 1
        return n_tokens

    def turn(
        self,
        messages: Sequence[Message],
        reply: str | Sequence[int],
        session: str | None = None,
        *,
        tools: list[Any] | None = None,
        headers: dict[str, str] | None = None,
    ) -> Turn:
        """Send messages and have the model say `reply`, text or ids, and its end token.

        The restored caches must give the logits that computing the whole prompt gives.
        """
        raised = dict.fromkeys(("request_received", "reply_sent"), Exception)
        with (
            manager.using(self._manager),
            mock.patch.dict(manager.RAISED, raised),
            mock.patch.object(serving, "LAST_PART_S", 0.0),  # one thread says and saves here
        ):
            return self._turn(copy.deepcopy(list(messages)), reply, session, tools, headers or {})

    def _turn(
        self,
        messages: list[Message],
        reply: str | Sequence[int],
        session: str | None,
        tools: list[Any] | None,
        sent_headers: dict[str, str],
    ) -> Turn:
        request = Request(messages, copy.deepcopy(tools))
        headers = Headers()
        for name, value in sent_headers.items():
            headers[name] = value
        if session is not None:
            headers["X-Session-ID"] = session
        seen = ClientRequest.of(request)
        manager.ask("request_received", request=seen, headers=headers, body={})
        args = SimpleNamespace(**vars(GENERATION_ARGS), chat_template_kwargs=None)
        prompt, segments, types, *_ = self._generator._tokenize(self.tokenizer, request, args)
        n_of_segments = list(map(len, segments))
        caches, rest = self._cache.fetch_nearest_cache(self._key, prompt)
        n_reused = len(prompt) - len(rest)
        caches = caches or list(self._make_caches() or ())
        assert {cache.size() for cache in caches} == {n_reused}
        logits = self._prefill(prompt, segments, types, caches, n_reused)
        self._assert_as_computed(prompt, logits)
        said = self.encode(reply) if isinstance(reply, str) else list(reply)
        said.append(self.tokenizer.eos_token_id)
        self._forward(said, caches)
        message = self._as_sent(said[:-1])
        # Which of `_say` and the save comes first is a race between the server's threads.
        self._n_turns += 1
        if self._n_turns % 2:
            self._say(seen, message)
        ids = prompt[:]
        ids += said
        self._cache.insert_cache(self._key, ids, caches)
        if not self._n_turns % 2:
            self._say(seen, message)
        self.stored.append(list(ids))
        self.prompt_ends.update(accumulate(n_of_segments))
        outcome = RequestState.of(seen).outcome
        assert outcome is not None and outcome.n_reused == n_reused
        return Turn(outcome.kind, len(prompt), n_reused, list(ids), message)

    def _prefill(
        self,
        prompt: list[int],
        segments: list[list[int]],
        types: list[str],
        caches: list[Any],
        n_done: int,
    ) -> mx.array:
        """Compute the rest, and save caches at each segment's end, as the server does."""
        end = 0
        for n, (segment, segment_type) in enumerate(zip(segments, types, strict=True)):
            end += len(segment)
            if end <= n_done:
                continue
            logits = self._forward(prompt[n_done:end], caches)
            n_done = end
            if n < len(segments) - 1:
                given = list(caches)  # the server gives its list away
                self._cache.insert_cache(self._key, prompt[:end], given, cache_type=segment_type)
        return logits

    def _forward(self, ids: Sequence[int], caches: list[Any]) -> mx.array:
        """Feed ids; return the logits of the last one, [vocab]."""
        for start in range(0, len(ids), BLOCK_TOKENS):  # attention over a whole prompt takes long
            some = mx.array([list(ids[start : start + BLOCK_TOKENS])])
            logits: mx.array = self.model(some, cache=caches)[0, -1]
            mx.eval(logits, [cache.state for cache in caches])
        return logits

    def _assert_as_computed(self, prompt: list[int], logits: mx.array) -> None:
        ids, caches = self._computed
        if not 0 < len(ids) < len(prompt) or prompt[: len(ids)] != ids:
            caches, cold = self._first(prompt)
        else:
            cold = self._forward(prompt[len(ids) :], caches)
        self._computed = prompt[:], caches
        difference = float(mx.abs(logits - cold).max())
        assert difference < LOGIT_TOLERANCE, f"logits differ by {difference}"
        second, first = sorted(float(x) for x in mx.topk(cold, 2))
        if first - second > 2 * LOGIT_TOLERANCE:
            assert int(mx.argmax(logits)) == int(mx.argmax(cold))

    def _first(self, prompt: list[int]) -> tuple[list[Any], mx.array]:
        """Return the caches and the logits of a prompt no part of which was computed before."""
        key = (*self._key, *self._options[2:], tuple(prompt))
        if key not in self._firsts:
            if len(self._firsts) == MOST_FIRSTS:
                del self._firsts[next(iter(self._firsts))]
            caches = list(self._make_caches() or ())
            self._firsts[key] = caches, self._forward(prompt, caches)
        caches, logits = self._firsts[key]
        return copy.deepcopy(caches), logits

    def _as_sent(self, ids: list[int]) -> Message:
        """Return a reply as the server's detokenizer, tool parser and JSON make it."""
        detokenizer = self.tokenizer.detokenizer
        for token_id in ids:
            detokenizer.add_token(token_id)
        detokenizer.finalize()
        reasoning, _, text = detokenizer.text.rpartition("</think>")
        content, *calls = text.split("<tool_call>")
        message: Message = {"role": "assistant", "content": content or None}
        if reasoning:
            message["reasoning"] = reasoning.removeprefix("<think>")
        if calls:
            message["tool_calls"] = [
                _sent_call(
                    f"call-{n}", self.tokenizer.tool_parser(call.partition("</tool_call>")[0])
                )
                for n, call in enumerate(calls)
            ]
        return message

    def _say(self, request: ClientRequest, message: Message) -> None:
        manager.ask(
            "reply_sent",
            request=request,
            content=message["content"] or "",
            reasoning=message.get("reasoning", ""),
            tool_calls=copy.deepcopy(message.get("tool_calls", [])),
        )


def _sent_call(call_id: str, call: dict[str, Any]) -> dict[str, Any]:
    arguments = json.dumps(call["arguments"], ensure_ascii=False)
    function = {"name": call["name"], "arguments": arguments}
    return {"id": call_id, "type": "function", "function": function}
