"""Expected changes of mlx-lm do not stop the server, and plugins still get every request."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from mlx_lm_kvpersist.apis import openai_error
from mlx_lm_kvpersist.cli.selftest import check_patch, check_startup
from mlx_lm_kvpersist.errors import PatchNotEffective, SignatureChanged
from mlx_lm_kvpersist.host.hooks import Prompt, TakenRequest
from mlx_lm_kvpersist.host.manager import Taken, TakenTokens
from mlx_lm_kvpersist.host.patching.patches import PATCHES, Overrides, Patch, PatchSet
from tests.support import ServerProcess, StartServer, coming_host, synthetic_text
from tests.support.host import REPOSITORY

ANSWERS = "/v1/answers"
BODY = {"input": synthetic_text(400, seed=3)}
BY_NAME = {patch.name: patch for patch in PATCHES}


@pytest.fixture
def coming(server: ModuleType) -> Iterator[ModuleType]:
    """The server's module with changes of open pull requests, for one test."""
    before, defaults = dict(vars(server)), server._run_http_server.__defaults__
    coming_host.change(server)
    yield server
    server._run_http_server.__defaults__ = defaults
    vars(server).clear()
    vars(server).update(before)


@pytest.mark.parametrize("patch", PATCHES, ids=lambda patch: patch.name)
def test_every_patch_takes_effect_on_the_coming_host(patch: Patch, coming: ModuleType) -> None:
    check_patch(patch)


def test_the_coming_host_starts_with_the_plugin(coming: ModuleType) -> None:
    check_startup()


def test_prompt_cache_passes_unknown_arguments_to_stock(
    server: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments: list[tuple[Any, ...]] = []

    class Grown(server.LRUPromptCache):  # type: ignore[name-defined,misc]
        def fetch_nearest_cache(
            self, model: Any, tokens: list[int], limit: int = 0, *, consume: bool = False
        ) -> Any:
            arguments.append((limit, consume))
            return None, tokens

        def insert_cache(
            self,
            model: Any,
            tokens: list[int],
            prompt_cache: Any,
            owner: str = "",
            *,
            cache_type: str = "assistant",
            pinned: bool = False,
        ) -> None:
            arguments.append((owner, cache_type, pinned))

    monkeypatch.setattr(server, "LRUPromptCache", Grown)
    BY_NAME["prompt_cache"].check_host()
    cache = BY_NAME["prompt_cache"].replace(Grown)(10)
    cache.fetch_nearest_cache("m", [1, 2], 3, consume=True)
    cache.insert_cache("m", [1, 2], [], "me", cache_type="user", pinned=True)
    assert arguments == [(3, True), ("me", "user", True)]
    taken = TakenTokens([1, 2], Taken("probe", TakenRequest(Prompt([1, 2], [[1, 2]], ["user"]))))
    taken.taken.caches, taken.taken.n_cached = ["caches"], 1
    assert cache.fetch_nearest_cache("m", taken, consume=True) == (["caches"], [2])


def test_new_required_parameter_of_the_host_raises_signature_changed(
    server: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Changed(server.LRUPromptCache):  # type: ignore[name-defined,misc]
        def fetch_nearest_cache(self, model: Any, tokens: list[int], limit: int) -> Any: ...

    monkeypatch.setattr(server, "LRUPromptCache", Changed)
    with pytest.raises(SignatureChanged, match=r"is \(self, model.* limit: "):
        BY_NAME["prompt_cache"].check_host()


@pytest.mark.parametrize(
    ("source", "fits"),
    [
        ("def f(self, a, b=1): ...", True),
        ("def f(self, a, b=1, c=2): ...", True),
        ("def f(self, a, b=2): ...", False),
        ("def f(self, a, b): ...", False),
        ("def f(self, a, b=1, *args, c=None, **more): ...", True),
        ("def f(self, a, b=1, *, c): ...", False),
        ("def f(self, b=1, c=2): ...", False),
        ("def f(self, c, a, b=1): ...", False),
        ("def f(self, b, a): ...", False),
    ],
)
def test_signature_may_only_gain_parameters_with_defaults(source: str, fits: bool) -> None:
    class Ours:
        def f(self, a: Any, b: int = 1, *args: Any, **kwargs: Any) -> None: ...

    module = ModuleType("host")
    exec(f"class Stock:\n    {source}", vars(module))
    expectation = Overrides("Stock", Ours, ("f",))
    if fits:
        expectation.check(module)
    else:
        with pytest.raises(SignatureChanged):
            expectation.check(module)


def test_probe_fails_if_a_factory_makes_stocks_prompt_cache(
    coming: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If a factory refers to stock's class, the patch has no effect."""
    stock = coming.LRUPromptCache
    monkeypatch.setattr(coming, "make_lru_prompt_cache", lambda args: stock(10))
    applied = PatchSet()
    applied.apply([BY_NAME["prompt_cache"]])
    try:
        with pytest.raises(PatchNotEffective, match="has no effect"):
            BY_NAME["prompt_cache"].check()
    finally:
        applied.undo()


@pytest.fixture(scope="module")
def coming_server(started: StartServer, tiny_model: Path) -> ServerProcess:
    launcher = ("-m", "tests.support.coming_host")
    return started.with_plugin(tiny_model, launcher=launcher, cwd=REPOSITORY)


def ask(server: ServerProcess, **headers: str) -> tuple[dict[str, str], Any]:
    """Send a request to the new path; return its reply's headers and body."""
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    status, reply_headers, body = server.request("POST", ANSWERS, BODY, named)
    assert status == 200, body
    return reply_headers, json.loads(body)


def test_a_new_path_that_generates_has_sessions_tenants_and_headers(
    coming_server: ServerProcess,
) -> None:
    headers, first = ask(coming_server, X_Session_ID="new-path")
    assert headers["x-kvpersist"].startswith("outcome=")
    assert first["cached"] == 0
    headers, again = ask(coming_server, X_Session_ID="new-path")
    assert again["answer"] == first["answer"]
    assert again["cached"] > 100
    headers, other = ask(coming_server, X_KVPersist_Namespace="another")
    assert other["cached"] == 0
    requests = json.loads(coming_server.request("GET", "/v1/kvpersist/requests")[2])
    assert [(each["session"], each["namespace"]) for each in requests[:3]] == [
        (None, "another"),
        ("new-path", ""),
        ("new-path", ""),
    ]


def test_plugin_can_refuse_a_request_on_a_new_path(
    coming_server: ServerProcess,
) -> None:
    keep = {"X-KVPersist-Keep": "perhaps"}
    status, _, body = coming_server.request("POST", ANSWERS, BODY, keep)
    assert (status, json.loads(body)) == (
        400,
        openai_error(400, "X-KVPersist-Keep is 'perhaps', expected yes or no"),
    )
    reply = coming_server.chat([{"role": "user", "content": "Hello?"}], max_tokens=2)
    assert reply.completion_tokens > 0
