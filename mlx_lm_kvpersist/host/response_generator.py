"""The server's response generator: plugins see a request before and after it is tokenized."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from . import manager
from .prompt import Prompt, RequestTokens

if TYPE_CHECKING:
    from mlx_lm.server import ResponseGenerator as Stock
else:
    Stock = object

logger = logging.getLogger(__name__)


class PluginResponseGenerator(Stock):  # type: ignore[misc]
    """Tokenizes as stock does, between two hooks. Generation thread."""

    def _tokenize(self, tokenizer: Any, request: Any, args: Any) -> tuple[Any, ...]:
        """Return stock's tuple; its ids know their request.

        Stock reports what this raises to the client. So `prepare_messages`, which decides what
        the model is told, may refuse a request; `prepare_prompt` only makes it faster.
        """
        if request.request_type == "chat":
            manager.ask("prepare_messages", request=request, args=args, tokenizer=tokenizer)
        ids, segments, segment_types, *rest = super()._tokenize(tokenizer, request, args)
        if not ids:
            # Nothing catches what the batch generator raises later, and its thread would die.
            raise ValueError("the prompt has no tokens")
        if not isinstance(ids[0], int):
            raise ValueError("the prompt must be a single string")
        # From 0.32.1 the images of a prompt come last; their positions count on these very ids.
        if len(rest) > 1 and rest[1] is not None:
            return ids, segments, segment_types, *rest
        prompt = Prompt(ids, segments, segment_types)
        prepared = prepare_prompt(request, args, tokenizer, prompt)
        return (
            RequestTokens(prepared.ids, request),
            list(prepared.segments),  # stock pops from these two
            list(prepared.segment_types),
            *rest,
        )


def prepare_prompt(request: Any, args: Any, tokenizer: Any, prompt: Prompt) -> Prompt:
    """Return what the plugins make of a prompt: the prompt itself, if they fail or do not care."""
    prepared = manager.ask_safely(
        "prepare_prompt", request=request, args=args, tokenizer=tokenizer, prompt=prompt
    )
    if prepared is None or prepared is prompt:
        return prompt
    if not is_cut_well(prepared):
        logger.error(
            "hook prepare_prompt returned segments that are not its ids cut up; "
            "the rendered prompt is used"
        )
        return prompt
    assert isinstance(prepared, Prompt)
    return prepared


def is_cut_well(prompt: Prompt) -> bool:
    """Tell whether a prompt has ids and its segments, none empty, are these ids."""
    joined = [token for segment in prompt.segments for token in segment]
    return (
        len(prompt.segments) == len(prompt.segment_types)
        and all(prompt.segments)
        and bool(joined)
        and joined == prompt.ids
    )
