"""Refuses the requests that would end stock's generation thread or leave a client without answer.

Stock's batched path catches no exception, and MLX checks no index on the CPU. A value that stock
can serve, however odd, is left to stock.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..errors import RequestRefused

MAX_BODY_BYTES = 256 << 20
_MAX_SLICE = 2**31
_UNBOUNDED = ("temperature", "repetition_penalty", "presence_penalty", "frequency_penalty")
_KINDS = {dict: "an object", list: "a list", str: "text", type(None): "null", bool: "a boolean"}


def check_body_length(length: str | None) -> None:
    """Refuse a Content-Length that is negative or larger than any prompt; stock checks the form."""
    if length is not None and length.strip().lstrip("+-").isdecimal() and len(length) < 20:
        if int(length) < 0:
            raise RequestRefused(f"Content-Length is {length}, expected 0 or more")
        if int(length) > MAX_BODY_BYTES:
            size = f"{MAX_BODY_BYTES >> 20} MiB"
            raise RequestRefused(f"the body has {length} bytes, expected at most {size}", 413)
    elif length is not None and len(length) >= 20:
        raise RequestRefused(f"Content-Length has {len(length)} characters, expected a number")


def check_parameters(body: Mapping[str, Any], given: Any) -> None:
    """Refuse parameters of a wrong form. HTTP thread, before stock's own checks.

    given: has the parameters as attributes, with the server's defaults in them.
    """
    for name in _UNBOUNDED:
        _check(name, getattr(given, name), "a number below 1.8e308", _fits_float)
    for name in ("repetition", "presence", "frequency"):
        size = getattr(given, f"{name}_context_size")
        _check(f"{name}_context_size", size, f"at most {_MAX_SLICE:,}", _fits_slice)
    _check("seed", given.seed, "an integer from 0 to 2**64 - 1", _is_seed)
    _check("logit_bias", given.logit_bias, "numbers for token ids", _is_bias)
    _check("top_logprobs", given.top_logprobs, "an integer", lambda n: not isinstance(n, bool))
    _check_stop(body.get("stop"))
    _check("stream_options", body.get("stream_options"), "an object", _is_object_or_null)
    kwargs = body.get("chat_template_kwargs")
    _check("chat_template_kwargs", kwargs, "an object", lambda k: not k or isinstance(k, dict))
    if isinstance(given.temperature, int | float) and given.temperature != 0:
        _check_sampling(given)


def _check_sampling(given: Any) -> None:
    """Refuse what mlx-lm's samplers raise for; with temperature 0 they are not asked."""
    _check("top_k", given.top_k, "an integer", lambda k: not isinstance(k, bool))
    _check("min_p", given.min_p, "a number from 0 to 1", lambda p: p == p)
    if isinstance(given.xtc_probability, float) and given.xtc_probability > 0:
        threshold = given.xtc_threshold
        _check(
            "xtc_threshold",
            threshold,
            "a number from 0 to 0.5",
            lambda t: not isinstance(t, float) or 0 <= t <= 0.5,
        )


def _check_stop(stop: Any) -> None:
    """Refuse stop words that are not texts. Stock takes the keys of an object for a list."""
    _check(
        "stop", stop, "text, or a list of texts", lambda s: not s or type(s) in (str, list, dict)
    )
    for i, word in enumerate([stop] if isinstance(stop, str) else stop or ()):
        _check(f"stop[{i}]", word, "text", lambda w: isinstance(w, str))
        _check(f"stop[{i}]", word, "text that is valid Unicode", _is_unicode)


def check_messages(messages: Any) -> None:
    """Refuse messages of a wrong form. HTTP thread."""
    _check("messages", messages, "a list of messages", lambda m: isinstance(m, list))
    for i, message in enumerate(messages):
        _check(f"messages[{i}]", message, "an object", lambda m: isinstance(m, dict))
        content = message.get("content")
        _check(f"messages[{i}].content", content, "text that is valid Unicode", _is_unicode)
        for j, part in enumerate(content if isinstance(content, list) else ()):
            name = f"messages[{i}].content[{j}]"
            _check(name, part, "an object", lambda p: isinstance(p, dict))
            _check(f"{name}.text", part.get("text"), "text that is valid Unicode", _is_unicode)
            if part.get("type") in ("image_url", "input_image", "image"):
                url = part.get("image_url", part.get("image"))
                url = url.get("url") if isinstance(url, dict) else url
                _check(f"{name}.image_url", url, "a URL", lambda u: isinstance(u, str | None))


def check_prompt(prompt: Any) -> None:
    """Refuse a prompt of a text completion that is not one text. HTTP thread."""
    _check("prompt", prompt, "one text", lambda p: isinstance(p, str))
    _check("prompt", prompt, "text that is valid Unicode", _is_unicode)


def check_ids(args: Any, n_logits: int) -> None:
    """Refuse token ids and counts beyond a model's vocabulary. Generation thread.

    args: stock's GenerationArguments. n_logits: how many tokens the model can choose from.
    Negative ids count from the end, as stock has it.
    """
    for token in args.logits.logit_bias or ():
        if not -n_logits <= token < n_logits:
            raise RequestRefused(
                f"logit_bias names token {token}, expected ids below {n_logits:,}, "
                "the size of this model's vocabulary"
            )
    if args.sampling.temperature != 0 and args.sampling.top_k >= n_logits:
        raise RequestRefused(
            f"top_k is {args.sampling.top_k}, expected 0 (off) or less than {n_logits:,}, "
            "the size of this model's vocabulary"
        )
    if args.top_logprobs > n_logits:
        raise RequestRefused(f"top_logprobs is {args.top_logprobs}, expected at most {n_logits:,}")


def check_prompt_ids(ids: Any) -> None:
    """Refuse a prompt that is not a list of at least one token id. Generation thread."""
    if not isinstance(ids, list) or (ids and not isinstance(ids[0], int)):
        raise RequestRefused(f"the prompt became a {type(ids).__name__}, expected a list of ids")
    if not ids:
        raise RequestRefused("the prompt has no tokens, expected at least one")


def _check(name: str, value: Any, expected: str, is_right: Any) -> None:
    if not is_right(value):
        raise RequestRefused(f"{name} is {_described(value)}, expected {expected}")


def _described(value: Any) -> str:
    """Return a short name of a value for an error message."""
    if isinstance(value, int | float) and not isinstance(value, bool):
        return repr(value) if not isinstance(value, int) or abs(value) < 10**20 else "too large"
    return _KINDS.get(type(value), "of another type")


def _fits_float(value: Any) -> bool:
    try:
        return not isinstance(value, int) or bool(float(value) == float(value))
    except OverflowError:
        return False


def _fits_slice(value: Any) -> bool:
    return not isinstance(value, int) or value <= _MAX_SLICE


def _is_seed(value: Any) -> bool:
    return not isinstance(value, int) or 0 <= value < 2**64


def _is_bias(value: Any) -> bool:
    """Tell whether stock's conversion works or raises ValueError, which it answers with 400."""
    if not isinstance(value, dict):
        return True
    return all(isinstance(v, str | int | float) and _fits_float(v) for v in value.values())


def _is_object_or_null(value: Any) -> bool:
    return value is None or isinstance(value, dict)


def _is_unicode(value: Any) -> bool:
    """Tell whether a text can be encoded: half of a surrogate pair cannot. Others are not text."""
    if not isinstance(value, str) or value.isascii():
        return True
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True
