from __future__ import annotations

from email.message import Message
from typing import Any

import pytest

from mlx_lm_kvpersist.api.session_keys import is_kept, namespace, note, session_key, unshared
from mlx_lm_kvpersist.errors import RequestRefused

UUID = "0f3a2b1c-9d8e-4f70-8a6b-5c4d3e2f1a0b"


def headers(values: dict[str, str]) -> Message:
    message = Message()
    for name, value in values.items():
        message[name] = value
    return message


CASES: dict[str, tuple[dict[str, str], dict[str, Any], str | None]] = {
    "nothing": ({}, {"messages": []}, None),
    "own header": ({"X-Session-ID": "../../etc/passwd"}, {}, "../../etc/passwd"),
    "empty header": ({"X-Session-ID": ""}, {}, None),
    "claude code": ({"X-Claude-Code-Session-Id": "s"}, {}, "s/main"),
    "claude code agent": (
        {"X-Claude-Code-Session-Id": "s", "x-claude-code-agent-id": "a"},
        {},
        "s/a",
    ),
    "codex": ({"User-Agent": "codex_cli_rs/0.169", "session_id": "c"}, {}, "c"),
    "codex by originator": ({"originator": "codex_exec", "thread-id": "t"}, {}, "t"),
    "session_id header of another client": ({"session_id": "x"}, {}, None),
    "open webui": ({"X-OpenWebUI-Chat-Id": "w"}, {}, "w"),
    "litellm": ({"x-litellm-session-id": "l"}, {}, "l"),
    "affinity": ({"x-session-affinity": "f"}, {}, "f"),
    "other vendor": ({"X-Acme-Session-Id": "v"}, {}, "v"),
    "parent is lineage only": ({"x-parent-session-id": "p"}, {}, None),
    "prompt_cache_key": ({}, {"prompt_cache_key": "k", "session_id": "n"}, "k"),
    "body session_id": ({}, {"session_id": "n"}, "n"),
    "metadata session_id": ({}, {"metadata": {"session_id": "m"}}, "m"),
    "user_id as json": ({}, {"metadata": {"user_id": '{"session_id": "j", "u": 1}'}}, "j"),
    "user_id with suffix": ({}, {"metadata": {"user_id": f"user_1_account__session_{UUID}"}}, UUID),
    "user_id nested too deeply": ({}, {"metadata": {"user_id": "[" * 100_000}}, None),
    "a person's id": (
        {},
        {"user": "ada", "safety_identifier": "ada", "metadata": {"user_id": "a"}},
        None,
    ),
    "not text": ({}, {"prompt_cache_key": 7, "session_id": ["x"], "metadata": "m"}, None),
}


@pytest.mark.parametrize("case", CASES)
def test_session_key_of_each_source(case: str) -> None:
    sent, body, expected = CASES[case]
    assert session_key(headers(sent), body) == expected


def test_sources_of_session_keys_have_an_order() -> None:
    """Without the source that wins, the next source wins."""
    sent = {
        "X-Session-ID": "1",
        "X-Claude-Code-Session-Id": "2",
        "originator": "codex",
        "thread-id": "3",
        "X-OpenWebUI-Chat-Id": "4",
        "x-litellm-session-id": "5",
        "x-session-affinity": "6",
        "x-acme-session-id": "7",
    }
    body: dict[str, Any] = {
        "prompt_cache_key": "8",
        "session_id": "9",
        "metadata": {"session_id": "10", "user_id": '{"session_id": "11"}'},
    }
    seen = []
    for name in [*sent]:
        seen.append(session_key(headers(sent), body))
        del sent[name]
    seen.append(session_key(headers(sent), body))
    del body["prompt_cache_key"]
    seen.append(session_key(headers({}), body))
    del body["session_id"]
    seen.append(session_key(headers({}), body))
    del body["metadata"]["session_id"]
    seen.append(session_key(headers({}), body))
    assert list(dict.fromkeys(seen)) == ["1", "2/main", "3", *map(str, range(4, 12))]


def test_namespace_is_the_value_of_the_clients_header() -> None:
    assert namespace(headers({}), by_key=False) == ""
    assert namespace(headers({"Authorization": "Bearer a"}), by_key=False) == ""
    assert namespace(headers({"X-KVPersist-Namespace": "team"}), by_key=False) == "team"


def test_namespace_by_key_cannot_be_reached_with_another_key() -> None:
    keys = [{"Authorization": "Bearer a"}, {"Authorization": "Bearer b"}, {"x-api-key": "a"}, {}]
    names = ["", "team", "key", "a"]
    namespaces = {
        namespace(headers({**key, "X-KVPersist-Namespace": name}), by_key=True)
        for key in keys
        for name in names
    }
    assert len(namespaces) == len(keys) * len(names)
    for hashed in namespaces:
        assert "Bearer" not in hashed
        for key in keys:
            sent = {**key, "X-KVPersist-Namespace": hashed}
            assert namespace(headers(sent), by_key=True) not in namespaces


def test_long_or_invalid_names_are_hashed() -> None:
    for name in ("x" * 257, "x" * 8_000_000, "é" * 200, "\ud800"):
        key = session_key(headers({}), {"session_id": name})
        assert key is not None and len(key.encode()) <= 256 and key.startswith("digest-")
        assert key != session_key(headers({}), {"session_id": name + "y"})
    assert session_key(headers({"X-Session-ID": "x" * 256}), {}) == "x" * 256
    long = namespace(headers({"X-KVPersist-Namespace": "n" * 300}), by_key=False)
    assert len(long) < 64


def test_unshared_namespaces_are_all_different() -> None:
    assert len({unshared("team") for _ in range(100)}) == 100


@pytest.mark.parametrize("user_id", ["123", "null", "[]", '["session_id"]', '{"session_id": 5}'])
def test_user_id_without_a_session_id_gives_no_key(user_id: str) -> None:
    assert session_key(Message(), {"metadata": {"user_id": user_id}}) is None


@pytest.mark.parametrize(
    ("values", "expected"),
    [([], True), (["yes"], True), (["no"], False), ([" No "], False), (["yes", "no"], False)],
)
def test_request_is_kept_unless_a_header_says_no(values: list[str], expected: bool) -> None:
    sent = Message()
    for value in values:
        sent["X-KVPersist-Keep"] = value
    assert is_kept(sent) is expected


@pytest.mark.parametrize("value", ["", "false", "no, no", "0"])
def test_other_values_of_the_keep_header_are_refused(value: str) -> None:
    with pytest.raises(RequestRefused, match=r"X-KVPersist-Keep is .*, expected yes or no"):
        is_kept(headers({"X-KVPersist-Keep": value}))


def test_note_has_the_client_and_the_users_first_words() -> None:
    headers = Message()
    assert note(headers, []) == {}
    headers["User-Agent"] = "claude-cli/2.0.14 (external, cli)"
    parts = [{"text": "<system-reminder>a\nb</system-reminder>"}, {"text": " Fix\nthe <b>parser"}]
    messages: list[dict[str, Any]] = [
        {"role": "system", "content": "You are"},
        {"role": "user", "content": "<environment_context>x</environment_context>\n"},
        {"role": "user", "content": parts},
    ]
    assert note(headers, messages) == {"client": "claude-cli", "words": "Fix the <b>parser"}
    for text, words in (
        ("word " * 1000, "word " * 23 + "word…"),
        ("w" * 120 + " ", "w" * 120),
        ("w" * 121, "w" * 119 + "…"),
        ("a  b " * 20, "a b " * 19 + "a b"),
        ("a" + " " * 600 + "b", "a b"),
    ):
        assert note(headers, [{"role": "user", "content": text}])["words"] == words
    assert note(headers, [{"role": "user", "content": None}]) == {"client": "claude-cli"}
