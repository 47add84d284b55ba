"""Compare greedy replies of a server that is killed after each turn and of a server that is not.

    python -m tests.support.openblas python -m benchmarks.turns [--model FOLDER] [-- OPTIONS]

Each conversation of turns.json has twelve turns. The model is SmolLM2-135M in float32, unless
`--model` names another. One server runs all the time. The other is killed (SIGKILL) when each
conversation has one more reply and everything is written. Both servers get the same prompts:
the conversations continue with the first server's replies.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mlx_lm_kvpersist.api.admin import SPEC_PATH, STATS_PATH
from mlx_lm_kvpersist.config import DEFAULT_BITS
from tests.support import Message, ServerProcess
from tests.support.synthetic.smollm2 import make_smollm2

from .checks import check_kept
from .models import DEFAULT_MODELS_DIR

CONVERSATIONS = Path(__file__).with_suffix(".json")
MAX_TOKENS = 48


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, default=DEFAULT_MODELS_DIR / "smollm2-float32")
    parser.add_argument("options", nargs="*", help="further options of both servers")
    args = parser.parse_args()
    if not args.model.is_dir():
        make_smollm2(args.model)
    given = json.loads(CONVERSATIONS.read_text(encoding="utf-8"))["conversations"]
    talks = [Talk(one["kind"], one["messages"]) for one in given]
    with tempfile.TemporaryDirectory() as folder:
        stays, dies = (
            ServerProcess(
                args.model, *plugin(Path(folder) / name, args.options), start_timeout_s=600
            )
            for name in ("stays", "dies")
        )
        with stays, dies:
            for server in (stays, dies):
                spec = json.loads(server.request("GET", SPEC_PATH)[2])
                check_kept("turns", spec, bits_of(args.options))
            for turn in range(len(talks[0].questions)):
                for talk in talks:
                    talk.ask(stays, dies, turn)
                until_written(dies)
                dies.restart(kill=True)
                n_equal = sum(talk.n_equal for talk in talks)
                print(f"{n_equal} of {(turn + 1) * len(talks)} replies are equal", flush=True)
    for talk in talks:
        print(json.dumps(talk.row))


def plugin(store: Path, options: Sequence[str]) -> list[str]:
    return ["--plugin", "kvpersist", "--kvpersist-dir", str(store), *options]


def bits_of(options: Sequence[str]) -> str:
    options = [word for option in options for word in option.split("=", 1)]
    name = "--kvpersist-kv-bits"
    return options[options.index(name) + 1] if name in options else DEFAULT_BITS


def until_written(server: ServerProcess) -> None:
    while json.loads(server.request("GET", STATS_PATH)[2])["store"]["queue"]["tasks"]:
        time.sleep(0.05)


@dataclass
class Talk:
    """A conversation, and the number of equal replies of both servers."""

    kind: str
    questions: Sequence[str]
    messages: list[Message] = field(default_factory=list)
    n_equal: int = 0
    n_prompt: int = 0
    n_restored: int = 0
    first_difference: int | None = None

    def ask(self, stays: ServerProcess, dies: ServerProcess, turn: int) -> None:
        """Ask both servers, and continue with the first server's reply."""
        self.messages.append({"role": "user", "content": self.questions[turn]})
        expected, found = (
            server.chat(
                self.messages,
                self.kind.replace(" ", "-"),
                max_tokens=MAX_TOKENS,
                temperature=0.0,
                logprobs=True,
            )
            for server in (stays, dies)
        )
        if found.ids == expected.ids:
            self.n_equal += 1
        else:
            self.first_difference = self.first_difference or turn + 1
            print(
                f"{self.kind}: the replies of turn {turn + 1} differ: {expected.text!r}, from the "
                f"killed server {found.text!r}",
                flush=True,
            )
        self.n_prompt += found.prompt_tokens
        self.n_restored += int(found.kvpersist["restored"])
        # A reply that max_tokens cuts off can end within a character.
        said = expected.text.rstrip("\ufffd")
        self.messages.append({"role": "assistant", "content": said})

    @property
    def row(self) -> dict[str, Any]:
        return {
            "conversation": self.kind,
            "turns": len(self.questions),
            "equal replies": self.n_equal,
            "first turn that differs": self.first_difference,
            "prompt tokens": self.n_prompt,
            "restored from disk": self.n_restored,
        }


if __name__ == "__main__":
    main()
