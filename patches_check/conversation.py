"""Chat, kill -9, restart, chat: a test of the purpose of all patches, with a real server."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from mlx_lm_kvpersist.cli.demo import make_model
from mlx_lm_kvpersist.cli.servers import Message, StartedServer, document
from mlx_lm_kvpersist.errors import SelfTestFailed

N_CHARS = 4000
MAX_TOKENS = 16


@dataclass(frozen=True)
class Conversation:
    """The numbers of tokens are those of the second turn."""

    prompt_tokens: int
    cached_before: int
    cached_after: int
    """Reused tokens after kill -9 and a restart."""
    tier_after: str
    same_reply: bool

    def __str__(self) -> str:
        return (
            f"{self.cached_after:,} of {self.prompt_tokens:,} tokens reused after the restart, "
            f"{self.cached_before:,} before it; "
            f"{'the same reply' if self.same_reply else 'another reply'}"
        )

    def check(self) -> None:
        """Raise SelfTestFailed unless the conversation survived."""
        if self.cached_after == 0 or self.tier_after == "ram" or not self.same_reply:
            raise SelfTestFailed(
                f"{self}, tier {self.tier_after or 'none'}; expected tokens from disk, and the "
                "same reply"
            )


def play(folder: Path) -> Conversation:
    """Raises KVPersistError if a server does not start or does not answer."""
    model, store = make_model(folder / "model"), folder / "store"
    plugin = ("--plugin", "kvpersist", "--kvpersist-dir", str(store))
    messages: list[Message] = [{"role": "user", "content": document(N_CHARS)}]
    with StartedServer(str(model), *plugin, log_path=folder / "server.log") as server:
        first = server.chat(messages, "check", MAX_TOKENS)
        messages.append({"role": "assistant", "content": first.text})
        messages.append({"role": "user", "content": "Who was the keeper of the lock?"})
        before = server.chat(messages, "check", MAX_TOKENS)
        server.wait_until_written()
        server.kill9()
        server.start()
        after = server.chat(messages, "check", MAX_TOKENS)
    return Conversation(
        prompt_tokens=after.prompt_tokens,
        cached_before=before.cached_tokens,
        cached_after=after.cached_tokens,
        tier_after=after.said("tier"),
        same_reply=after.text == before.text,
    )
