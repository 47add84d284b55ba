"""No request ends the generation thread, and requests that stock serves are served the same."""

from __future__ import annotations

import json
from http.client import HTTPConnection
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from mlx_lm_kvpersist.errors import RequestRefused
from mlx_lm_kvpersist.host.http import request_checks
from mlx_lm_kvpersist.host.http.request_checks import (
    MAX_BODY_BYTES,
    check_body_length,
    check_messages,
    check_parameters,
)
from tests.support import FULL_PRECISION, ServerProcess, StartServer
from tests.support.stock import ignores_empty_stop_words

USER = [{"role": "user", "content": "Hello?"}]
CHAT = "/v1/chat/completions"
HUGE = 10**400
NAN, INF = float("nan"), float("inf")


@pytest.fixture(scope="module")
def server(started: StartServer, tiny_model: Path) -> ServerProcess:
    return started.with_plugin(tiny_model, *FULL_PRECISION)


@pytest.fixture(scope="module")
def stock(started: StartServer, tiny_model: Path) -> ServerProcess:
    return started(tiny_model)


def post(
    server: ServerProcess, path: str, body: bytes, headers: dict[str, str] | None = None
) -> tuple[int, bytes]:
    connection = HTTPConnection("127.0.0.1", server.port, timeout=30)
    try:
        connection.request("POST", path, body, headers or {})
        with connection.getresponse() as response:
            return response.status, response.read()
    finally:
        connection.close()


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "stop of a number in a list": ({"stop": [5]}, "stop[0] is 5, expected text"),
    "stop of a number": ({"stop": 5}, "stop is 5"),
    "stop of true": ({"stop": True}, "stop is a boolean"),
    "stop of null in a list": ({"stop": ["a", None]}, "stop[1] is null"),
    "stop of lists": ({"stop": [["a"]]}, "stop[0] is a list"),
    "stop of half a surrogate pair": (
        {"stop": ["\ud800"]},
        "stop[0] is not valid Unicode at character 0",
    ),
    "max_tokens of 0": ({"max_tokens": 0}, "at least 1"),
    "max_tokens below 0": ({"max_tokens": -1}, "max_tokens"),
    "bias beyond the vocabulary": ({"logit_bias": {"99999": 1}}, "names token 99999, expected"),
    "bias below the vocabulary": ({"logit_bias": {"-99999": 1}}, "names token -99999"),
    "bias of a huge id": ({"logit_bias": {"9" * 30: 1}}, "logit_bias names token 999"),
    "bias of 2**40": ({"logit_bias": {str(2**40): 1}}, "logit_bias names token 1099511627776"),
    "bias of a list": ({"logit_bias": {"1": [1]}}, "logit_bias is an object, expected numbers"),
    "bias of null": ({"logit_bias": {"1": None}}, "logit_bias is an object, expected numbers"),
    "bias of a huge number": ({"logit_bias": {"1": HUGE}}, "logit_bias is an object"),
    "huge temperature": ({"temperature": HUGE}, "temperature is too large"),
    "huge repetition penalty": ({"repetition_penalty": HUGE}, "repetition_penalty is too large"),
    "huge presence penalty": ({"presence_penalty": -HUGE}, "presence_penalty is too large"),
    "huge frequency penalty": ({"frequency_penalty": HUGE}, "frequency_penalty is too large"),
    "top_k beyond the vocabulary": ({"temperature": 1, "top_k": 99999}, "top_k is 99999"),
    "top_k of true": ({"temperature": 1, "top_k": True}, "top_k is a boolean"),
    "min_p that is not a number": ({"temperature": 1, "min_p": NAN}, "min_p is nan"),
    "xtc_threshold above a half": (
        {"temperature": 1, "xtc_probability": 0.5, "xtc_threshold": 0.9},
        "xtc_threshold is 0.9, expected a number from 0 to 0.5",
    ),
    "xtc_threshold that is not a number": (
        {"temperature": 1, "xtc_probability": 0.5, "xtc_threshold": NAN},
        "xtc_threshold is nan",
    ),
    "huge context size": (
        {"repetition_penalty": 1.1, "repetition_context_size": 2**31 + 1},
        "repetition_context_size is 2147483649, expected at most",
    ),
    "top_logprobs of true": ({"top_logprobs": True}, "top_logprobs is a boolean"),
    "negative seed": ({"seed": -1}, "seed is -1, expected an integer from 0"),
    "huge seed": ({"seed": 2**64}, "seed is 18446744073709551616"),
    "stream_options of a number": ({"stream": True, "stream_options": 5}, "stream_options is 5"),
    "template arguments of a list": ({"chat_template_kwargs": ["a"]}, "chat_template_kwargs is a"),
    "a template that returns an array": (
        {"chat_template_kwargs": {"return_tensors": "np"}},
        "the prompt became a ndarray, expected a list of ids",
    ),
    "an empty template": (
        {"chat_template_kwargs": {"chat_template": ""}},
        "the prompt has no tokens",
    ),
    "messages that are text": ({"messages": ["hi"]}, 'messages[0] is "hi", expected an object'),
    "messages of a number": ({"messages": 5}, "messages is 5, expected a list"),
    "messages of null": ({"messages": None}, "messages is null"),
    "a role that is a list": (
        {"messages": [{"role": ["a"], "content": "b"}]},
        "no prompt can be made of this request (",
    ),
    "a part whose type is an object": (
        {"messages": [{"role": "tool", "content": [{"type": {}}]}]},
        "messages[0].content[0].type is an object, expected text, image_url or file",
    ),
    "a part whose type is null": (
        {"messages": [{"role": "tool", "content": [{"type": None}]}]},
        "messages[0].content[0].type is null, expected text, image_url or file",
    ),
    "a text that is a number": (
        {"messages": [{"role": "tool", "content": [{"type": "text", "text": 5}]}]},
        "messages[0].content[0].text is 5, expected text",
    ),
    "a part that is text": (
        {"messages": [{"role": "user", "content": ["a"]}]},
        'messages[0].content[0] is "a", expected an object',
    ),
    "an image that is a number": (
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": 5}]}]},
        "messages[0].content[0].image_url is 5, expected a URL",
    ),
    "tools of a number": ({"tools": 5}, "no prompt can be made of this request (TypeError"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused_request_does_not_end_the_generation_thread(
    server: ServerProcess, case: str
) -> None:
    sent, expected_message = REFUSED[case]
    body = {"messages": USER, "max_tokens": 2, **sent}
    status, answer = post(server, CHAT, json.dumps(body).encode())
    assert (status, expected_message in json.loads(answer)["error"]["message"]) == (400, True), (
        answer
    )
    assert server.chat(USER, max_tokens=2).completion_tokens > 0


def test_error_names_the_first_of_two_faults() -> None:
    with pytest.raises(RequestRefused, match=r"^messages\[0\].role is null"):
        check_messages([{"content": "a"}, "b"])
    with pytest.raises(RequestRefused, match=r"^messages\[0\].content\[0\].type is 5"):
        check_messages([{"role": "user", "content": [{"type": 5}, "b"]}])


def test_body_lengths_up_to_the_maximum_are_accepted() -> None:
    for length in (None, "0", str(MAX_BODY_BYTES)):
        check_body_length(length)


@pytest.mark.parametrize(("probability", "threshold"), [(0.5, 0.5), (0.0, 0.9)])
def test_xtc_threshold_is_checked_only_if_xtc_is_used(probability: float, threshold: float) -> None:
    kinds = ("repetition", "presence", "frequency")
    sizes = {f"{kind}_context_size": 20 for kind in kinds}
    penalties = dict.fromkeys((f"{kind}_penalty" for kind in kinds), 0.0)
    sampling = {"temperature": 1.0, "top_k": 0, "min_p": 0.0, "xtc_threshold": threshold}
    others = {"seed": None, "top_logprobs": 0, "max_tokens": 5, "stream": False}
    given = SimpleNamespace(**sizes, **penalties, **sampling, **others)
    given.xtc_probability = probability
    check_parameters({}, given)
    given.xtc_probability, given.xtc_threshold = 0.5, 0.6
    with pytest.raises(RequestRefused, match="xtc_threshold is"):
        check_parameters({}, given)


def test_max_tokens_of_zero_is_refused() -> None:
    """mlx-lm 0.32.0 accepts the request, and its generation thread ends."""
    penalties = dict.fromkeys(f"{kind}_penalty" for kind in ("repetition", "presence", "frequency"))
    with pytest.raises(RequestRefused, match="max_tokens is 0, expected at least 1"):
        check_parameters({}, SimpleNamespace(temperature=0.0, max_tokens=0, **penalties))


@pytest.mark.parametrize(
    ("path", "body", "expected_message"),
    [
        ("/v1/completions", b'{"prompt": ["a", "b"]}', "prompt is a list, expected text"),
        ("/v1/completions", b'{"prompt": ""}', "the prompt has no tokens"),
        ("/v1/completions", b'{"prompt": null}', "prompt is null"),
        ("/v1/completions", b"{}", "prompt is null, expected text"),
        (CHAT, b"{}", "messages is null, expected a list of objects"),
        (CHAT, b"[" * 100_000, "the body is not valid JSON: maximum recursion"),
        (CHAT, b'{"messages": "\xff"}', "the body is not valid JSON: 'utf-8'"),
    ],
)
def test_malformed_bodies_are_answered_with_400(
    server: ServerProcess, path: str, body: bytes, expected_message: str
) -> None:
    status, answer = post(server, path, body)
    assert (status, expected_message in json.loads(answer)["error"]["message"]) == (400, True), (
        answer
    )
    assert server.complete("a", max_tokens=2).completion_tokens > 0


@pytest.mark.parametrize(
    ("length", "status"), [("-1", 400), (str(MAX_BODY_BYTES + 1), 413), ("9" * 5000, 400)]
)
def test_invalid_content_length_is_refused_before_the_body_is_read(
    server: ServerProcess, length: str, status: int
) -> None:
    answered, answer = post(server, CHAT, b"", {"Content-Length": length})
    assert answered == status and json.loads(answer)["error"], answer


ODD: dict[str, dict[str, Any]] = {
    "stop of 0": {"stop": 0},
    "an empty stop word": {"stop": [""]},
    "stop of an object": {"stop": {"zz": 1}},
    "a text as stop": {"stop": "zz"},
    "an empty bias": {"logit_bias": {}},
    "a bias from the end": {"logit_bias": {"-1": 2}},
    "a bias as text": {"logit_bias": {"5": "3.5"}},
    "an infinite bias": {"logit_bias": {"5": -INF}},
    "top_k without sampling": {"temperature": 0, "top_k": 99999},
    "xtc without sampling": {"temperature": 0, "xtc_probability": 0.5, "xtc_threshold": 0.9},
    "max_tokens of true": {"max_tokens": True},
    "a draft model of null": {"draft_model": None},
    "num_draft_tokens": {"num_draft_tokens": 10**30},
    "a context size of 0": {"repetition_penalty": 1.3, "repetition_context_size": 0},
    "the largest context size": {"repetition_penalty": 1.3, "repetition_context_size": 2**31},
    "infinite penalties": {"presence_penalty": INF},
    "a seed of true": {"seed": True},
    "the largest seed": {"seed": 2**64 - 1},
    "max_completion_tokens": {"max_completion_tokens": 3, "max_tokens": "x"},
    "top_logprobs": {"top_logprobs": 11, "logprobs": True},
    "null template arguments": {"chat_template_kwargs": None},
    "template arguments of false": {"chat_template_kwargs": False},
    "template arguments of an empty list": {"chat_template_kwargs": []},
    "top_k of false": {"temperature": 0.1, "top_k": False, "logit_bias": {"5": 100}},
    "top_logprobs of false": {"top_logprobs": False},
    "stream_options without a stream": {"stream_options": 5},
    "stream_options of an odd value": {"stream_options": {"include_usage": "x"}},
    "a template in the request": {"chat_template_kwargs": {"chat_template": "say {{ messages }}"}},
    "content of an object": {"messages": [{"role": "user", "content": {"a": 1}}]},
    "content of a number": {"messages": [{"role": "user", "content": 5}]},
    "content of null": {"messages": [*USER, {"role": "assistant", "content": None}]},
    "parts of text": {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}]}]},
    "text with a field of images": {
        "messages": [{"role": "user", "content": [{"type": "text", "text": "a", "image_url": 5}]}]
    },
    "content without parts": {"messages": [{"role": "user", "content": []}]},
    "role_mapping of a number": {"role_mapping": 5},
    "unknown fields": {"n": 2, "user": 5, "metadata": 7, "session_id": [1], "foo": {"a": []}},
}


@pytest.mark.parametrize("case", ODD)
def test_odd_requests_get_the_same_reply_as_in_stock(
    server: ServerProcess, stock: ServerProcess, case: str
) -> None:
    if case == "an empty stop word" and not ignores_empty_stop_words():
        pytest.skip("this mlx-lm ends the reply before its first token")
    body = json.dumps({"messages": USER, "max_tokens": 6, **ODD[case]}).encode()
    replies = []
    for either in (server, stock):
        status, answer = post(either, CHAT, body)
        assert status == 200, answer
        reply = json.loads(answer)
        reply["usage"].pop("prompt_tokens_details")
        replies.append((reply["choices"], reply["usage"]))
    assert replies[0] == replies[1]


def test_huge_max_tokens_is_accepted(server: ServerProcess) -> None:
    body = {"messages": USER, "max_tokens": 10**30, "stop": [*"aeiou", " ", "."]}
    status, answer = post(server, CHAT, json.dumps(body).encode())
    assert (status, json.loads(answer)["choices"][0]["finish_reason"]) == (200, "stop")


@pytest.mark.parametrize(
    "name", ["temperature", "presence_penalty", "frequency_penalty", "repetition_penalty"]
)
def test_integers_too_large_for_mlx_are_accepted(server: ServerProcess, name: str) -> None:
    """Such integers end stock's generation thread, which accepts the same numbers as floats."""
    body = {"messages": USER, "max_tokens": 4, "top_p": 0.9, name: 10**30}
    status, answer = post(server, CHAT, json.dumps(body).encode())
    assert status == 200, answer
    assert server.complete("a", max_tokens=2).completion_tokens > 0


def test_stream_ends_with_done_and_has_usage_only_if_requested(server: ServerProcess) -> None:
    """Stock raises KeyError at the end of the stream, and [DONE] is never sent."""
    for options, n_usage in (({}, 0), ({"include_usage": True}, 1), (None, 0)):
        body = {"messages": USER, "max_tokens": 3, "stream": True, "stream_options": options}
        events = [data for _, data in server.events(CHAT, body)]
        assert events[-1] == "[DONE]"
        usage = [event for event in events[:-1] if "usage" in json.loads(event)]
        assert len(usage) == n_usage


@pytest.mark.parametrize("has_config", [True, False])
def test_hub_model_is_refused_if_it_has_no_config_file(
    has_config: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if has_config:
        (tmp_path / "config.json").touch()
    monkeypatch.setattr(request_checks, "snapshot_download", lambda name, **kw: str(tmp_path))
    if has_config:
        request_checks.check_model("some/model", ["mine"], None)
    else:
        with pytest.raises(RequestRefused, match="no model some/model; this server has mine"):
            request_checks.check_model("some/model", ["mine"], None)


def test_unreachable_hub_is_not_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Downloading one file would be tried again for 23 seconds."""
    monkeypatch.setattr("time.sleep", lambda seconds: pytest.fail(f"waits {seconds} s"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(RequestRefused, match="no model some/model"):
        request_checks.check_model("some/model", ["mine"], None)
