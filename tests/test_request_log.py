"""The last requests are remembered, and quote prompts only where that is wanted."""

from __future__ import annotations

from mlx_lm_kvpersist.request.outcome import Divergence, Kind, Outcome
from mlx_lm_kvpersist.request.serving import RequestState
from mlx_lm_kvpersist.request_log import KEPT, RequestLog


def test_as_many_requests_are_remembered_as_are_shown() -> None:
    log = RequestLog()
    ids = [log.add(RequestState(), "m", Outcome(Kind.MISS, 9))["id"] for _ in range(KEPT + 1)]
    assert len(set(ids)) == KEPT + 1
    assert [one["id"] for one in log.records()] == ids[:0:-1]


def test_a_prompt_is_quoted_only_where_that_is_wanted() -> None:
    quote = Divergence(5, 0, "user", 3, stored="a secret", asked="a question")
    outcome = Outcome(Kind.DIVERGE, 9, divergence=quote)
    hidden = {**vars(quote), "stored": None, "asked": None}
    log = RequestLog()
    assert log.add(RequestState("s"), "m", outcome)["divergence"] == vars(quote)
    assert log.add(RequestState("s", is_kept=False), "m", outcome)["divergence"] == hidden
    assert RequestLog(with_text=False).add(RequestState("s"), "m", outcome)["divergence"] == hidden
    assert [one["divergence"] for one in log.records(with_text=False)] == [hidden, hidden]
    assert [one["divergence"] for one in log.records()] == [hidden, vars(quote)]


def test_what_a_deleted_session_said_is_forgotten() -> None:
    log = RequestLog()
    quote = Divergence(0, None, None, None, stored="a secret", asked="a question")
    for name in ("deleted", "other", None):
        log.add(RequestState(name), "model", Outcome(Kind.DIVERGE, 9, divergence=quote))
    log.forget("deleted")
    records = log.records()
    assert [record["session"] for record in records] == [None, "other"]
    assert "secret" not in str(records)  # another session's record may quote the deleted one
    log.add(RequestState("new"), "model", Outcome(Kind.DIVERGE, 9, divergence=quote))
    assert "secret" in str(log.records()[0])


def test_a_first_token_is_added_to_its_request() -> None:
    log = RequestLog()
    first, second = (log.add(RequestState(), "m", Outcome(Kind.MISS, 9)) for _ in range(2))
    log.timed(first["id"], 0.25)
    log.timed("no-such", 1.0)
    newest, oldest = log.records()
    assert (newest["id"], newest["first_token_s"]) == (second["id"], None)
    assert (oldest["id"], oldest["first_token_s"]) == (first["id"], 0.25)
    assert first["first_token_s"] is None  # the writer may be at it
