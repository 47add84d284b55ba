"""The records of the last requests."""

from __future__ import annotations

from mlx_lm_kvpersist.request.outcome import Divergence, History, Kind, Outcome


def test_what_a_deleted_session_said_is_forgotten() -> None:
    history = History()
    quote = Divergence(0, None, None, None, stored="a secret", asked="a question")
    for name in ("deleted", "other", None):
        history.add(name, "", "model", Outcome(Kind.DIVERGE, 9, divergence=quote))
    history.forget("deleted")
    records = history.records()
    assert [record["session"] for record in records] == [None, "other"]
    assert "secret" not in str(records)  # another session's record may quote the deleted one
    history.add("new", "", "model", Outcome(Kind.DIVERGE, 9, divergence=quote))
    assert "secret" in str(history.records()[0])


def test_a_first_token_is_added_to_its_request() -> None:
    history = History()
    first, second = (history.add(None, "", "m", Outcome(Kind.MISS, 9)) for _ in range(2))
    history.timed(first["id"], 0.25)
    history.timed("no-such", 1.0)
    newest, oldest = history.records()
    assert (newest["id"], newest["first_token_s"]) == (second["id"], None)
    assert (oldest["id"], oldest["first_token_s"]) == (first["id"], 0.25)
    assert first["first_token_s"] is None  # the writer may be at it
