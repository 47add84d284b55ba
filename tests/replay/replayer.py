"""Replay conversations through the plugin's hooks, in the order in which the server calls them.

HTTP and sampling are left out: the test supplies each reply. Everything else is real: session
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
MAX_COLD_PROMPTS = 32
"""The number of cold prompts whose caches are kept."""

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
    """The result of a request: `ids` has prompt and reply, `message` is the received reply."""

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
    """A plugin with a model whose tokenizer is byte-level: each token is a byte string."""

    _cold_prompts: ClassVar[dict[tuple[Any, ...], tuple[list[Any], mx.array]]] = {}
    """Caches and logits of prompts that were computed without the store. Tests share them.

    The keys are model, options and ids.
    """

    def __init__(self, model_path: Path, folder: Path, *options: str) -> None:
        self.model, self.tokenizer = load(str(model_path))
        self.stored: list[list[int]] = []
        """The ids of every saved sequence."""
        self.prompt_ends: set[int] = set()
        """The ends of prompt segments. The server saves the prompt at each end."""
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
        """The last prompt, and its caches, computed without the store."""
        self._manager = manager.PluginManager()
        self._manager.register(self._plugin)

    def close(self) -> None:
        """Shut down as the server does at SIGTERM."""
        self._plugin.shutdown()

    def restart(self) -> None:
        """Close the plugin, and start it again with the store on disk."""
        self.close()
        self.open()

    def encode(self, text: str) -> list[int]:
        ids: list[int] = self.tokenizer.encode(text, add_special_tokens=False)
        return ids

    def bytes_of(self, ids: Sequence[int]) -> bytes:
        return b"".join(self._pieces[i] for i in ids)

    def n_common(self, ids: Sequence[int], prompt: bytes) -> int:
        """Return how many of the first `ids` together spell a prefix of `prompt`.

        The prefix ends at a token's end and at a character's end.
        """
        ends = [0, *accumulate(len(self._pieces[i]) for i in ids)]
        text = self.bytes_of(ids)
        n_tokens = bisect_right(ends, common_prefix(text, prompt, 0)) - 1
        while 0x80 <= ord(text[ends[n_tokens] :][:1] or b" ") < 0xC0:
            n_tokens -= 1
        return n_tokens

    def n_reusable(self, ids: Sequence[int], prompt: bytes) -> int:
        """Return how many of the first `ids` can replace the first tokens of `prompt`.

        If only some of them match, the last must be a token of the prompt's own tokenization, at
        the same position: the rest is then tokenized as in the whole prompt.
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
        """Send messages; the model replies with `reply` (text or ids) and an end token.

        Check that the restored caches give the logits of a prompt computed without the store.
        """
        raised = dict.fromkeys(("request_received", "reply_sent"), Exception)
        with (
            manager.using(self._manager),
            mock.patch.dict(manager.RAISED, raised),
            mock.patch.object(serving, "LAST_PART_S", 0.0),  # one thread sends and saves here
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
        client_request = ClientRequest.of(request)
        manager.ask("request_received", request=client_request, headers=headers, body={})
        args = SimpleNamespace(**vars(GENERATION_ARGS), chat_template_kwargs=None)
        prompt, segments, types, *_ = self._generator._tokenize(self.tokenizer, request, args)
        n_of_segments = list(map(len, segments))
        caches, rest = self._cache.fetch_nearest_cache(self._key, prompt)
        n_reused = len(prompt) - len(rest)
        caches = caches or list(self._make_caches() or ())
        assert {cache.size() for cache in caches} == {n_reused}
        logits = self._prefill(prompt, segments, types, caches, n_reused)
        self._assert_as_computed(prompt, logits)
        reply_ids = self.encode(reply) if isinstance(reply, str) else list(reply)
        reply_ids.append(self.tokenizer.eos_token_id)
        self._forward(reply_ids, caches)
        message = self._as_sent(reply_ids[:-1])
        # In the server, either of `_send_reply` and the save can come first.
        self._n_turns += 1
        if self._n_turns % 2:
            self._send_reply(client_request, message)
        ids = prompt[:]
        ids += reply_ids
        self._cache.insert_cache(self._key, ids, caches)
        if not self._n_turns % 2:
            self._send_reply(client_request, message)
        self.stored.append(list(ids))
        self.prompt_ends.update(accumulate(n_of_segments))
        outcome = RequestState.of(client_request).outcome
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
        """Compute the remaining tokens; save caches at each segment's end, as the server does."""
        end = 0
        for n, (segment, segment_type) in enumerate(zip(segments, types, strict=True)):
            end += len(segment)
            if end <= n_done:
                continue
            logits = self._forward(prompt[n_done:end], caches)
            n_done = end
            if n < len(segments) - 1:
                passed = list(caches)  # the cache keeps the list that the server passes
                self._cache.insert_cache(self._key, prompt[:end], passed, cache_type=segment_type)
        return logits

    def _forward(self, ids: Sequence[int], caches: list[Any]) -> mx.array:
        """Feed ids; return the logits of the last id, [vocab]."""
        for start in range(0, len(ids), BLOCK_TOKENS):  # attention over a whole prompt is slow
            chunk = mx.array([list(ids[start : start + BLOCK_TOKENS])])
            logits: mx.array = self.model(chunk, cache=caches)[0, -1]
            mx.eval(logits, [cache.state for cache in caches])
        return logits

    def _assert_as_computed(self, prompt: list[int], logits: mx.array) -> None:
        ids, caches = self._computed
        if not 0 < len(ids) < len(prompt) or prompt[: len(ids)] != ids:
            caches, cold = self._compute_cold(prompt)
        else:
            cold = self._forward(prompt[len(ids) :], caches)
        self._computed = prompt[:], caches
        difference = float(mx.abs(logits - cold).max())
        assert difference < LOGIT_TOLERANCE, f"logits differ by {difference}"
        second, first = sorted(float(x) for x in mx.topk(cold, 2))
        if first - second > 2 * LOGIT_TOLERANCE:
            assert int(mx.argmax(logits)) == int(mx.argmax(cold))

    def _compute_cold(self, prompt: list[int]) -> tuple[list[Any], mx.array]:
        """Compute a prompt without the store; return its caches and its logits."""
        key = (*self._key, *self._options[2:], tuple(prompt))
        if key not in self._cold_prompts:
            if len(self._cold_prompts) == MAX_COLD_PROMPTS:
                del self._cold_prompts[next(iter(self._cold_prompts))]
            caches = list(self._make_caches() or ())
            self._cold_prompts[key] = caches, self._forward(prompt, caches)
        caches, logits = self._cold_prompts[key]
        return copy.deepcopy(caches), logits

    def _as_sent(self, ids: list[int]) -> Message:
        """Return a reply as a client receives it: after detokenizer, tool parser and JSON."""
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

    def _send_reply(self, request: ClientRequest, message: Message) -> None:
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
