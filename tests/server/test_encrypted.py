"""A conversation in an encrypted folder, with kill -9 after each turn."""

from __future__ import annotations

from pathlib import Path

from mlx_lm_kvpersist.cli import main as cli
from mlx_lm_kvpersist.store.encryption import read_key
from tests.support import Message, ServerProcess, synthetic_text

from .stored import wait_for_reply

SECRET = "The patient is called Ottilie"
SESSION = "session-of-ottilie"


def turns(server: ServerProcess, *, kills: bool) -> list[tuple[str, int]]:
    """Run a conversation; return each reply and how many tokens of its prompt were reused."""
    messages: list[Message] = [{"role": "system", "content": f"{SECRET}. {synthetic_text(900)}"}]
    replies = []
    for n in range(3):
        messages.append({"role": "user", "content": f"{n}. {synthetic_text(200, seed=n)}"})
        reply = server.chat(messages, SESSION, max_tokens=60, temperature=0.0)
        messages.append({"role": "assistant", "content": reply.text})
        replies.append((reply.text, reply.cached_tokens))
        wait_for_reply(server)
        if kills:
            server.restart(kill=True)
    return replies


def test_encrypted_folder_gives_the_replies_and_reuse_of_a_plain_folder(
    tiny_model: Path, tmp_path: Path
) -> None:
    key, store = tmp_path / "key", tmp_path / "encrypted"
    assert cli.main(["key", str(key)]) == 0
    replies = {}
    for name, options in (("plain", ()), ("encrypted", ("--kvpersist-encrypt", str(key)))):
        plugin = "--plugin", "kvpersist", "--kvpersist-dir", str(tmp_path / name)
        with ServerProcess(
            tiny_model, *plugin, *options, log_path=tmp_path / f"{name}.log"
        ) as server:
            replies[name] = turns(server, kills=bool(options))
            if options:
                first: Message = {"role": "system", "content": f"{SECRET}. {synthetic_text(900)}"}
                again = server.chat([first, {"role": "user", "content": "?"}], max_tokens=1)
                assert again.kvpersist["tier"] == "disk"
    assert replies["encrypted"] == replies["plain"]
    assert replies["plain"][2][1] > 1000
    files = [path for path in store.rglob("*") if path.is_file()]
    blocks = [path for path in files if path.parts[-3] == "blocks"]
    whole = b"".join(path.read_bytes() for path in files)
    assert len(blocks) > 4
    for needle in (SECRET, SESSION, "Ottilie", tiny_model.name):
        assert needle.encode() not in whole, needle
    for path in blocks:
        assert read_key(key).key_of(path.stem).hex() not in str(path)
