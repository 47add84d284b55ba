"""Access to the operator's routes."""

from __future__ import annotations

from email.message import Message
from types import ModuleType, SimpleNamespace

import pytest

from mlx_lm_kvpersist.api.admin import (
    SESSIONS_PATH,
    check_operator,
    check_site,
    is_loopback,
    root_view,
    session_changes,
    sessions_view,
)
from mlx_lm_kvpersist.errors import RequestRefused
from mlx_lm_kvpersist.host.hooks import Route, hookimpl
from mlx_lm_kvpersist.host.patching.probes import answer
from tests.support.host import plugged


def why_refused(address: str, headers: dict[str, str], key: str | None) -> str:
    """Return why a request is refused, "" if it is not."""
    message = Message()
    for name, value in headers.items():
        message[name] = value
    try:
        check_operator(SimpleNamespace(client_address=(address, 0), headers=message), key)
    except RequestRefused as error:
        assert error.status == 403
        return str(error)
    return ""


LOCAL = {"Host": "127.0.0.1:8080"}


@pytest.mark.parametrize(
    ("address", "sent", "reason"),
    [
        ("127.0.0.1", LOCAL, ""),
        ("::1", {"Host": "[::1]:8080"}, ""),
        ("::ffff:127.0.0.1", {"Host": "localhost"}, ""),
        ("127.0.0.1", {**LOCAL, "Origin": "http://localhost:3000"}, ""),
        ("192.168.1.2", LOCAL, "comes from 192.168.1.2"),
        ("fe80::1%eth0", LOCAL, "comes from fe80::1%eth0"),
        ("127.0.0.1", {"Host": "evil.example:8080"}, "Host names another machine"),
        ("127.0.0.1", {"Host": "127.0.0.1.evil.example"}, "Host names another machine"),
        ("127.0.0.1", {}, "Host names another machine"),
        ("127.0.0.1", {"Host": "[::1"}, "Host names another machine"),
        ("127.0.0.1", {**LOCAL, "X-Forwarded-For": "127.0.0.1"}, "proxy (X-Forwarded-For)"),
        ("127.0.0.1", {**LOCAL, "x-forwarded-proto": "https"}, "proxy (x-forwarded-proto)"),
        ("127.0.0.1", {**LOCAL, "Forwarded": "for=127.0.0.1"}, "proxy (Forwarded)"),
        ("127.0.0.1", {**LOCAL, "Via": "1.1 proxy"}, "proxy (Via)"),
        ("127.0.0.1", {**LOCAL, "CF-Connecting-IP": "203.0.113.9"}, "proxy (CF-Connecting-IP)"),
        ("127.0.0.1", {**LOCAL, "True-Client-IP": "203.0.113.9"}, "proxy (True-Client-IP)"),
        ("127.0.0.1", {**LOCAL, "X-Client-IP": "203.0.113.9"}, "proxy (X-Client-IP)"),
        ("127.0.0.1", {**LOCAL, "Tailscale-User-Login": "a@b.c"}, "proxy (Tailscale-User-Login)"),
        ("127.0.0.1", {**LOCAL, "Origin": "https://evil.example"}, "Origin names another site"),
        ("127.0.0.1", {**LOCAL, "Origin": "null"}, "Origin names another site"),
    ],
)
def test_without_a_key_only_local_programs_are_admitted(
    address: str, sent: dict[str, str], reason: str
) -> None:
    refusal = why_refused(address, sent, None)
    assert bool(refusal) is bool(reason)
    assert reason in refusal


@pytest.mark.parametrize(
    ("authorization", "is_admitted"),
    [
        ("Bearer gehêim", False),
        ("Bearer secret", True),
        ("Bearer secret ", False),
        ("secret", False),
        ("", False),
    ],
)
def test_with_a_key_only_requests_with_that_key_are_admitted(
    authorization: str, is_admitted: bool
) -> None:
    for address in ("127.0.0.1", "203.0.113.9"):
        sent = {"Host": "public.example", "Authorization": authorization}
        assert (why_refused(address, sent, "secret") == "") is is_admitted


@pytest.mark.parametrize(("key", "sent"), [(None, ""), ("secret", ""), ("secret", "Bearer other")])
def test_pages_of_other_sites_need_the_key(key: str | None, sent: str) -> None:
    headers = Message()
    headers["Host"], headers["Origin"] = "127.0.0.1:8080", "https://evil.example"
    headers["Authorization"] = sent
    with pytest.raises(RequestRefused, match=r"Origin is 'https://evil\.example'"):
        check_site(headers, key)
    headers.replace_header("Authorization", "Bearer secret")
    if key is not None:
        check_site(headers, key)


def test_is_loopback_accepts_only_loopback_hosts() -> None:
    assert is_loopback("127.5.5.5") and is_loopback("localhost:1") and is_loopback("[::1]")
    assert not is_loopback("0.0.0.0") and not is_loopback("localhost.evil") and not is_loopback("")


class Root:
    """Answers `/` as the plugin does."""

    def __init__(self, key: str | None) -> None:
        self._key = key

    @hookimpl
    def routes(self) -> list[Route]:
        return [Route("GET", "/", root_view(self._key))]


@pytest.mark.filterwarnings("ignore:mlx_lm.server is not recommended")
@pytest.mark.parametrize(
    ("host", "key", "redirects"),
    [
        ("127.0.0.1:8080", None, True),
        ("public.example", None, False),
        ("public.example", "secret", True),  # the page asks for the key
    ],
)
def test_root_redirects_to_the_page_or_names_the_api(
    patched_server: ModuleType, host: str, key: str | None, redirects: bool
) -> None:
    with plugged(Root(key)):
        answered = answer(patched_server, f"GET /?a HTTP/1.1\r\nHost: {host}\r\n\r\n".encode())
    head, _, body = answered.partition("\r\n\r\n")
    assert head.split()[1] == ("303" if redirects else "200")
    assert ("\r\nLocation: /kvpersist\r\n" in f"{head}\r\n") is redirects
    assert body.count("\n") == (not redirects) and ("/v1" in body) is not redirects


@pytest.mark.parametrize("query", ["skip=", "sort=", "skip=-1", "sort=name"])
def test_list_of_sessions_refuses_wrong_parameters(query: str) -> None:
    list_sessions = sessions_view(lambda **which: which)
    with pytest.raises(RequestRefused, match=query.partition("=")[0]):
        list_sessions(SimpleNamespace(path=f"{SESSIONS_PATH}?{query}"))
    assert list_sessions(SimpleNamespace(path=f"{SESSIONS_PATH}?find="))["find"] == ""


def test_exported_session_has_the_documented_media_type() -> None:
    sessions = SimpleNamespace(export=lambda session_id: (1, [b"x"]))
    changes = session_changes(lambda: sessions, lambda name, namespace: None, with_text=False)
    answered = changes[f"{SESSIONS_PATH}/export"]({"id": "a"})
    assert answered.headers == {"Content-Type": "application/octet-stream"}
