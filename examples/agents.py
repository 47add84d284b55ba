"""Several agents that share one system prompt and talk in phases.

python examples/agents.py [--url http://127.0.0.1:8080] [--tokens 60]

Start the server first: mlx_lm.server --plugin kvpersist --model MODEL. For each request the program
prints how many tokens of its prompt should be reused, and how many were.
"""

from __future__ import annotations

import argparse
import json
import uuid
from typing import Any
from urllib.request import Request, urlopen

RULES = """You take part in a meeting of the harbour of a small island. There is one pier, one crane
and one tug boat. Three ships wait: the Aurora with fresh fish, the Borealis with timber, and the
Cygnus with forty passengers. One ship at a time can be at the pier, and each needs it for three
hours. The crane is needed for fish and for timber. The tide allows the Borealis to enter only in
the next four hours. Fish loses a tenth of its price with every hour. The passengers have been at
sea for two days, and the inn has room for thirty of them. The tug boat needs an hour of rest after
each ship. The meeting has three phases. First, each of you says what matters most to you. Then each
of you hears the others and proposes an order of the ships. At last, each of you says which order is
to be taken, and why. Speak for yourself only. Use at most three sentences. Do not repeat what was
said before. Numbers are in hours and in coins of the island. Whoever does not answer, agrees."""
ROLES = {
    "captain": "You are the captain of the Aurora.",
    "merchant": "You are the merchant who bought the timber.",
    "keeper": "You are the keeper of the inn.",
}
PHASES = {
    "state": "What matters most to you?",
    "discuss": "Propose an order of the ships.",
    "decide": "Which order is to be taken, and why?",
}


def ask(url: str, method: str, path: str, body: Any = None) -> Any:
    """Send a request to the server; return the JSON of the reply, or None if it is empty."""
    payload = None if body is None else json.dumps(body).encode()
    headers = {"Content-Type": "application/json"}
    with urlopen(Request(f"{url}/v1/agents{path}", payload, headers, method=method)) as reply:
        content = reply.read()
    return json.loads(content) if content else None


def row(phase: str, agent: str, prompt: int | str, expected: int | str, reused: int | str) -> None:
    print(f"{phase:<9} {agent:<10} {prompt:>8} {expected:>9} {reused:>8}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--url", default="http://127.0.0.1:8080")
    parser.add_argument("--tokens", type=int, default=60, help="maximum tokens of a reply")
    args = parser.parse_args()
    meeting = uuid.uuid4().hex[:6]
    ids = {name: f"{name}-{meeting}" for name in ROLES}
    expected: dict[str, int] = {}
    n_prompts = n_reused = 0

    row("phase", "agent", "prompt", "expected", "reused")
    computed = 0  # the first agent computes the system prompt for all of them
    for name, agent in ids.items():
        made = ask(args.url, "POST", "", {"id": agent, "system": RULES})["prefilled"]
        row("create", name, made["tokens"], computed, made["reused"])
        computed = expected[name] = made["tokens"]

    talks: dict[str, list[dict[str, str]]] = {name: [] for name in ROLES}
    said: dict[str, str] = {}
    for phase, task in PHASES.items():
        heard, said = said, {}
        for name, talk in talks.items():
            others = [f"The {who} said: {text}" for who, text in heard.items() if who != name]
            lines = [task] if talk else [ROLES[name], task]
            talk.append({"role": "user", "content": "\n".join([*others, *lines])})
            body = {"messages": talk, "max_tokens": args.tokens, "temperature": 0}
            reply = ask(args.url, "POST", f"/{ids[name]}/generate", body)
            said[name] = reply["choices"][0]["message"].get("content") or "Nothing."
            talk.append({"role": "assistant", "content": said[name]})
            usage = reply["usage"]
            reused = usage["prompt_tokens_details"]["cached_tokens"]
            row(phase, name, usage["prompt_tokens"], expected[name], reused)
            n_prompts, n_reused = n_prompts + usage["prompt_tokens"], n_reused + reused
            expected[name] = usage["total_tokens"]

    print(f"\nreused {n_reused:,} of {n_prompts:,} tokens in {len(PHASES)} phases")
    for name, agent in ids.items():
        about = ask(args.url, "GET", f"/{agent}")
        ram, disk = (about["tiers"][tier]["bytes"] / 2**20 for tier in ("ram", "disk"))
        print(f"{name:<10} {about['tokens']:>5} tokens, {ram:.1f} MiB in RAM, {disk:.1f} on disk")
        ask(args.url, "DELETE", f"/{agent}")


if __name__ == "__main__":
    main()
