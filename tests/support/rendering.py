"""Prompts without a server: a body of any API becomes ids as the server makes them."""

from __future__ import annotations

import copy
import json
from email.message import Message as Headers
from types import SimpleNamespace
from typing import Any

from mlx_lm.server import CompletionRequest, ResponseGenerator, process_message_content

from mlx_lm_kvpersist.api.messages import MessagesAPI
from mlx_lm_kvpersist.api.responses import ResponsesAPI
from mlx_lm_kvpersist.api.session_keys import normalise
from mlx_lm_kvpersist.host import manager
from mlx_lm_kvpersist.host.history import Templates
from mlx_lm_kvpersist.host.hooks import ClientRequest, Prompt, hookimpl
from mlx_lm_kvpersist.host.http import request_checks
from mlx_lm_kvpersist.host.scheduling.response_generator import PluginResponseGenerator

APIS: dict[str, Any] = {"messages": MessagesAPI(), "responses": ResponsesAPI()}


class _Normalises:
    @hookimpl
    def prepare_messages(self, messages: list[Any], tools: Any) -> None:
        normalise(messages, tools)


_PLUGINS = manager.PluginManager()
_PLUGINS.register(_Normalises())


class _Generator(PluginResponseGenerator, ResponseGenerator):  # type: ignore[misc]
    """The server's generator, as the patches make it."""


class Renderer:
    """Makes prompts with one tokenizer, as a patched server does."""

    def __init__(self, tokenizer: Any, **template_args: Any) -> None:
        self.tokenizer = tokenizer
        self._generator: Any = object.__new__(_Generator)
        self._generator._templates = Templates()
        self._generator.model_provider = SimpleNamespace(
            cli_args=SimpleNamespace(chat_template_args=template_args),
            processor=None,
            reads_images=False,
            max_context=None,
        )

    def prompt(self, body: dict[str, Any], api: str = "chat") -> Prompt:
        """Raises RequestRefused as the server does."""
        body, places = request_checks.tidy(copy.deepcopy(body)), ()
        if api != "chat":
            request = APIS[api].parse(body, Headers())
            body, places = json.loads(json.dumps(request.fields)), request.places
        request_checks.check_chat(body)
        continues = request_checks.is_continued(body)
        tools = body.get("tools") or None
        request = CompletionRequest("chat", "", body["messages"], tools, None)
        seen = ClientRequest.of(request)
        seen.continues, seen.places = continues, places
        args = SimpleNamespace(chat_template_kwargs=body.get("chat_template_kwargs"))
        with manager.using(_PLUGINS):
            made: Prompt = self._generator._render(self.tokenizer, request, args).prompt
        return made

    def text(self, body: dict[str, Any], api: str = "chat") -> str:
        return str(self.tokenizer.decode(list(self.prompt(body, api).ids)))

    def stock(self, body: dict[str, Any]) -> list[int] | None:
        """Return stock's ids, or None if stock refuses the request.

        Reasoning has both names, as in the server: old transformers read only one name.
        """
        messages = copy.deepcopy(body["messages"])
        for message in messages:
            if "reasoning" in message:
                message.setdefault("reasoning_content", message["reasoning"])
        try:
            process_message_content(messages)
            ids: list[int] = self.tokenizer.apply_chat_template(
                messages, add_generation_prompt=True, tools=body.get("tools")
            )
        except Exception:
            return None
        return ids or None
