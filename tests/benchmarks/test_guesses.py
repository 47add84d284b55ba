"""The benchmark of guesses says what it is told to say, and counts its steps."""

from __future__ import annotations

from pathlib import Path

from benchmarks import guesses
from mlx_lm_kvpersist.cache.geometry.kinds import most_taken_back
from mlx_lm_kvpersist.cli.quality_checks import server_attention
from mlx_lm_kvpersist.host.scheduling.guesses import Guesses


def test_each_reply_is_decoded_plainly_and_with_guesses(tmp_path: Path) -> None:
    text = tmp_path / "notes.txt"
    text.write_text("".join(f"line {n} says {n * n}\n" for n in range(40)), encoding="utf-8")
    rows = guesses.measure("synthetic:tiny", [text], 40, tmp_path).rows
    kinds = ["file", "edits", "unread file", "unread edits", "prose"]
    assert [row["reply"] for row in rows] == kinds
    assert all(row["tokens a step"] >= 1 and row["plain ms"] > 0 for row in rows)


def test_a_reply_that_repeats_takes_fewer_steps(tmp_path: Path) -> None:
    prompt, reply = [*range(1, 60)], [*range(10, 50)]
    model, make_caches = guesses.loaded("synthetic:tiny")
    made = Guesses(most_taken_back)
    made._won = 1e9
    with server_attention():
        stored = guesses.Stored([])
        *_, n_steps = guesses.decode(model, make_caches(), prompt, reply, made, stored)
        assert n_steps < len(reply) // 2
        made, stored = Guesses(most_taken_back), guesses.Stored([[*range(200, 240)]])
        made._won = 1e9
        *_, n_steps = guesses.decode(
            model, make_caches(), [*range(190, 206)], [*range(206, 236)], made, stored
        )
    assert n_steps < 15
