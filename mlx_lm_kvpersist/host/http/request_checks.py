"""Reads requests; refuses a request that would end mlx-lm's generation thread or get no answer.

mlx-lm's batched path catches no exception, and MLX checks no index on the CPU. Values that mlx-lm
can serve are not refused.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from os.path import isfile, join
from typing import Any

from huggingface_hub import snapshot_download, try_to_load_from_cache

from ...apis import placed_objects, readable, require, require_text, text_of, without_null
from ...errors import RequestRefused
from ...units import shortened
from ..attachments import IMAGE_KINDS

MAX_BODY_BYTES = 256 << 20
_MAX_SHOWN = 100
_MAX_SLICE = 2**31
_MLX_INTEGERS = 2**63
_CONVERSATION = {"system", "instructions", "tools", "messages", "input"}
_NUMBERS = ("temperature", "repetition_penalty", "presence_penalty", "frequency_penalty")

logger = logging.getLogger(__name__)


def check_body_length(length: str | None) -> int:
    try:
        n_bytes = int(length if length is not None else 0)
    except ValueError:
        shown = repr(shortened(length or "", 20))
        raise RequestRefused(f"Content-Length is {shown}, expected a number of bytes") from None
    if n_bytes < 0:
        raise RequestRefused(f"Content-Length is {n_bytes}, expected 0 or more")
    if n_bytes > MAX_BODY_BYTES:
        most = f"{MAX_BODY_BYTES >> 20} MiB"
        raise RequestRefused(f"the body has {n_bytes:,} bytes, expected at most {most}", 413)
    return n_bytes


def tidy(body: Any) -> Any:
    """Return a body with valid Unicode, and without the null fields that SDKs send."""
    if not isinstance(body, dict):
        return body
    body = without_null(body)
    return body | {name: readable(body[name]) for name in body.keys() & _CONVERSATION}


def late_body(timeout_s: float) -> RequestRefused:
    return RequestRefused(f"the body did not come within {timeout_s:.0f} s", 408)


def refusal_of(error: Exception, timeout_s: float) -> RequestRefused:
    """Return the refusal for an error. timeout_s: how long the server waits for a body."""
    if isinstance(error, RequestRefused):
        return error
    if isinstance(error, TimeoutError):
        return late_body(timeout_s)
    if isinstance(error, RecursionError):
        return RequestRefused(f"the body is not valid JSON: {error}")
    status, code = getattr(error, "status", 500), getattr(error, "code", None)
    if status == 500:
        logger.exception("kvpersist: a reply failed", exc_info=error)
    return RequestRefused(str(error), status, code)


def parameters(fields: Mapping[str, Any], args: Any) -> dict[str, Any]:
    """Return a request's parameters, under the attribute names of mlx-lm's handler.

    args: the server's options, which have some of the defaults.
    """
    values = {
        "stream_options": None,
        "num_draft_tokens": args.num_draft_tokens,
        "max_tokens": args.max_tokens,
        "temperature": args.temp,
        "top_p": args.top_p,
        "top_k": args.top_k,
        "min_p": args.min_p,
        "repetition_penalty": 0.0,
        "repetition_context_size": 20,
        "presence_penalty": 0.0,
        "presence_context_size": 20,
        "frequency_penalty": 0.0,
        "frequency_context_size": 20,
        "xtc_probability": 0.0,
        "xtc_threshold": 0.1,
        "logit_bias": None,
        "logprobs": False,
        "top_logprobs": -1,
        "seed": None,
        "chat_template_kwargs": None,
    }
    values |= {name: fields[name] for name in values.keys() & fields.keys()}
    if fields.get("max_completion_tokens") is not None:
        values["max_tokens"] = fields["max_completion_tokens"]
    return values | {
        "requested_model": fields.get("model", "default_model"),
        "requested_draft_model": fields.get("draft_model", "default_model"),
        "adapter": fields.get("adapters"),
    }


def check_bias(bias: Any) -> None:
    """Refuse a logit_bias whose conversion raises an error that mlx-lm does not catch."""
    if isinstance(bias, dict):
        is_right = all(isinstance(n, str | int | float) and _fits_float(n) for n in bias.values())
        require(is_right, "logit_bias", bias, "numbers for token ids")


def check_parameters(body: Mapping[str, Any], values: Any) -> None:
    """Refuse wrong parameters that mlx-lm's own checks have accepted. HTTP thread.

    values: an object whose attributes are the parameters, or the server's defaults.
    """
    for name in _NUMBERS:
        number = getattr(values, name)
        require(_fits_float(number), name, number, "a number below 8e307")
        if isinstance(number, int) and abs(number) >= _MLX_INTEGERS:
            setattr(values, name, float(number))  # MLX refuses large integers; stock's thread ends
    # mlx-lm 0.32.0 accepts 0, and then its generation thread ends.
    require(values.max_tokens >= 1, "max_tokens", values.max_tokens, "at least 1")
    for kind in ("repetition", "presence", "frequency"):
        size = getattr(values, name := f"{kind}_context_size")
        require(size <= _MAX_SLICE, name, size, f"at most {_MAX_SLICE:,}")
    is_seed = values.seed is None or 0 <= values.seed < 2**64
    require(is_seed, "seed", values.seed, "an integer from 0 to 2**64 - 1")
    top = values.top_logprobs
    require(top is not True, "top_logprobs", top, "an integer")
    if values.temperature != 0:  # at 0, mlx-lm calls no sampler
        require(values.top_k is not True, "top_k", values.top_k, "an integer")
        require(values.min_p == values.min_p, "min_p", values.min_p, "a number from 0 to 1")
        is_right = not values.xtc_probability > 0 or values.xtc_threshold <= 0.5
        require(is_right, "xtc_threshold", values.xtc_threshold, "a number from 0 to 0.5")
    options = body.get("stream_options") if values.stream else None  # for streams only, as in stock
    require(options is None or isinstance(options, dict), "stream_options", options, "an object")
    stop = body.get("stop")
    is_right = not stop or isinstance(stop, str | list | dict)  # stock uses the keys of an object
    require(is_right, "stop", stop, "text, or a list of texts")
    for i, word in enumerate([stop] if isinstance(stop, str) else stop or ()):
        require_text(f"stop[{i}]", word)


def check_model(name: str, own: Sequence[str], loaded: str | None) -> None:
    """Refuse a model that does not exist: mlx-lm would first drop the loaded model. HTTP thread.

    own: the names of the command line's model, if any. loaded: the model that is loaded now.
    """
    if name in (*own, loaded) or isfile(join(name, "config.json")):
        return
    try:
        find_on_hub(name)
    except Exception as error:
        here = f"this server has {own[0]}; ask for default_model" if own else "see GET /v1/models"
        message = f"there is no model {shortened(name, _MAX_SHOWN)}; {here}"
        raise RequestRefused(message, 404, "model_not_found") from error


def find_on_hub(name: str) -> None:
    """Raise an exception of the hub, or FileNotFoundError, unless a model is cached or on the hub.

    If the hub cannot be reached, `snapshot_download` fails immediately. One file's
    download would be retried for half a minute.
    """
    if not isinstance(try_to_load_from_cache(name, "config.json"), str):
        folder = snapshot_download(name, allow_patterns="config.json")
        if not isfile(join(folder, "config.json")):
            raise FileNotFoundError(f"{name} has no config.json")


def check_beside_model(draft: Any, adapter: str | None, args: Any) -> None:
    """Refuse a draft model or an adapter that does not exist. HTTP thread."""
    if require_text("draft_model", draft) != "default_model":
        check_model(draft, [args.draft_model] if args.draft_model else [], None)
    if adapter is not None and adapter != args.adapter_path:
        if not isfile(join(adapter, "adapter_config.json")):
            raise RequestRefused(
                f"there is no adapter {shortened(adapter, _MAX_SHOWN)}; name its folder", 404
            )


def check_chat(body: Mapping[str, Any]) -> None:
    """Refuse messages or template arguments of a wrong form. HTTP thread."""
    kwargs = body.get("chat_template_kwargs") or {}  # stock ignores false values
    require(isinstance(kwargs, dict), "chat_template_kwargs", kwargs, "an object")
    check_messages(body.get("messages"))


def is_continued(body: Mapping[str, Any], places: Sequence[str] = ()) -> bool:
    """Tell whether the reply continues the last message. An empty last message is removed.

    places: the names of the messages in the body of an API other than mlx-lm's.
    """
    messages, continues = body["messages"], body.get("continue_final_message", False)
    require(isinstance(continues, bool), "continue_final_message", continues, "a boolean")
    if not continues:
        return False
    last = messages[-1] if messages else {}
    text = text_of(last.get("content"))
    if last.get("role") != "assistant" or last.get("tool_calls") or not isinstance(text, str):
        expected = "expected an assistant's text as the last message"
        raise RequestRefused(f"continue_final_message is true, {expected}")
    if text != text.rstrip():  # templates drop this space, and the next word begins with a space
        place = [f"messages[{len(messages) - 1}].content", *places][-1]
        why = "final assistant content cannot end with trailing whitespace; leave it out"
        raise RequestRefused(f"{place}: {why}")
    if not text and len(messages) > 1:
        messages.pop()
    return bool(text)


def check_messages(messages: Any) -> None:
    """Refuse messages of a form that mlx-lm cannot render. Any thread."""
    for place, message in placed_objects("messages", messages):
        content, role = message.get("content"), message.get("role")
        require(role is not None, f"{place}.role", role, '"user" or another role')
        blocks = content if isinstance(content, list) else []
        for name, block in placed_objects(f"{place}.content", blocks):
            kind = block.get("type")
            require(isinstance(kind, str), f"{name}.type", kind, "text, image_url or file")
            text = block.get("text")
            require(isinstance(text, str | None), f"{name}.text", text, "text")
            if kind in IMAGE_KINDS:
                url = block.get("image_url", block.get("image"))
                url = url.get("url") if isinstance(url, dict) else url
                require(isinstance(url, str | None), f"{name}.image_url", url, "a URL")


def check_ids(args: Any, n_logits: int) -> None:
    """Refuse token ids, top_k and top_logprobs beyond a model's vocabulary. Generation thread.

    n_logits: how many ids the model can sample. Negative ids count from the end, as in mlx-lm.
    """
    top_k = args.sampling.top_k if args.sampling.temperature != 0 else 0
    limit = f"{n_logits:,}, the size of this model's vocabulary"
    for token in args.logits.logit_bias or ():
        if not -n_logits <= token < n_logits:
            raise RequestRefused(f"logit_bias names token {token}, expected ids below {limit}")
    require(top_k < n_logits, "top_k", top_k, f"0 (off) or less than {limit}")
    top = args.top_logprobs
    require(top <= n_logits, "top_logprobs", top, f"at most {limit}")


def check_prompt_ids(ids: Any) -> None:
    if not isinstance(ids, list) or (ids and not isinstance(ids[0], int)):
        raise RequestRefused(f"the prompt became a {type(ids).__name__}, expected a list of ids")
    if not ids:
        raise RequestRefused("the prompt has no tokens, expected at least one")


def _fits_float(number: Any) -> bool:
    return not isinstance(number, int) or abs(number) < 1 << 1023
