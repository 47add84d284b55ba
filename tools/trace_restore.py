"""`python -m tools.trace_restore`: the functions and files of the package that one restore runs.

A chat of a tiny model is stored, dropped from RAM, and continued. Counted is what runs in the hook
`take_request`, from the tokenized prompt to the restored caches, on all threads, the canary's
forward pass included. Layers are dequantized, so that the count does not depend on what is quickest
here. `--list` names the functions. Comprehensions count with the function that holds them.
"""

from __future__ import annotations

import argparse
import copy
import importlib
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from email.message import Message
from itertools import pairwise
from pathlib import Path
from types import FrameType, SimpleNamespace
from typing import Any

import mlx.core as mx

import mlx_lm_kvpersist
from mlx_lm_kvpersist.host import manager
from mlx_lm_kvpersist.host.patch import PATCH_SET
from mlx_lm_kvpersist.host.patches import PATCHES
from mlx_lm_kvpersist.host.probes import ARGS, GENERATION_ARGS
from mlx_lm_kvpersist.host.prompt import TakenTokens
from mlx_lm_kvpersist.plugin import KVPersistPlugin
from tests.support.synthetic import make_tiny_model, synthetic_text

PACKAGE = Path(mlx_lm_kvpersist.__file__).parent
ASKED = SimpleNamespace(**vars(GENERATION_ARGS), chat_template_kwargs=None)
Call = tuple[int, str, str]
"""Thread, file in the package, function."""


class Trace:
    """The calls of functions of the package, in order. Also of threads that start meanwhile."""

    def __init__(self) -> None:
        self.calls: list[Call] = []

    def __call__(self, frame: FrameType, event: str, argument: Any) -> None:
        code = frame.f_code
        if event != "call" or code.co_name.startswith("<"):
            return
        path = Path(code.co_filename)
        if path.is_relative_to(PACKAGE):
            name = getattr(code, "co_qualname", code.co_name)
            file = str(path.relative_to(PACKAGE))
            self.calls.append((threading.get_ident(), file, name))

    @contextmanager
    def running(self) -> Iterator[None]:
        threading.setprofile(self)
        sys.setprofile(self)
        try:
            yield
        finally:
            sys.setprofile(None)
            threading.setprofile(None)


class Server:
    """The server's own code from a request to its caches, without HTTP and batches."""

    def __init__(self, model: Path, store: Path) -> None:
        self.module = importlib.import_module("mlx_lm.server")
        self.plugin = KVPersistPlugin()
        parser = argparse.ArgumentParser()
        self.plugin.add_options(parser)
        options = ["--kvpersist-dir", str(store), "--kvpersist-kv-bits", "4"]
        options += ["--kvpersist-kv-rotate", "off", "--kvpersist-attention", "dequantize"]
        args = parser.parse_args(options, copy.copy(ARGS))
        args.model = str(model)
        plugins = manager.make_manager()
        plugins.register(self.plugin, name="kvpersist")
        manager.set_current(plugins)
        self.plugin.configure(args)
        self.provider = self.module.ModelProvider(args)
        self.provider.load_default()
        self.generator = object.__new__(self.module.ResponseGenerator)
        self.generator.model_provider = self.provider
        self.prompt_cache = self.module.LRUPromptCache(10)

    def turn(self, messages: list[dict[str, str]], trace: Trace) -> str:
        """Serve one request and save its turn; return the reply."""
        request = self.module.CompletionRequest("chat", "", copy.deepcopy(messages), None, None)
        manager.ask_all("request_received", request=request, headers=Message(), body={})
        tokenizer = self.provider.tokenizer
        prompt = self.generator._render(tokenizer, request, ASKED).prompt
        with trace.running():
            taken = manager.take_request(request, ASKED, tokenizer, prompt)
        assert taken is not None
        ids = taken.prompt.ids
        caches = taken.caches or self.provider.model.make_cache()
        tokens, new = TakenTokens(ids, taken), ids[taken.n_cached :]
        for n_new in range(6):
            logits = self.provider.model(mx.array([new]), cache=caches)
            new = [tokenizer.eos_token_id if n_new == 5 else int(mx.argmax(logits[0, -1]))]
            tokens.append(new[0])
        mx.eval(self.provider.model(mx.array([new]), cache=caches))
        self.prompt_cache.insert_cache("model", tokens, caches, cache_type="assistant")
        return str(tokenizer.decode(list(tokens[len(ids) : -1])))

    def forget_hot_blocks(self) -> None:
        assert self.plugin._store is not None
        self.plugin._store.drain()
        self.plugin._store.pool.clear()


def trace_restore(folder: Path) -> list[Call]:
    """Return the calls of one restore from disk."""
    PATCH_SET.apply(PATCHES)
    server = Server(make_tiny_model(folder / "model"), folder / "store")
    messages = [
        {"role": "system", "content": synthetic_text(300, seed=1)},
        {"role": "user", "content": synthetic_text(900, seed=2)},
    ]
    reply = server.turn(messages, Trace())
    server.forget_hot_blocks()
    messages += [
        {"role": "assistant", "content": reply},
        {"role": "user", "content": "And then?"},
    ]
    server.turn(messages, trace := Trace())
    server.plugin.shutdown()
    PATCH_SET.undo()
    return trace.calls


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("--list", action="store_true", help="name the functions of each file")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        calls = trace_restore(Path(folder))
    functions = {(file, name) for _, file, name in calls}
    files = sorted({file for file, _ in functions})
    here = [file for thread, file, _ in calls if thread == threading.get_ident()]
    n_changes = sum(a != b for a, b in pairwise(here))
    print(f"{len(functions)} functions in {len(files)} files, {n_changes} changes of file")
    for file in files if args.list else ():
        names = sorted(name for found, name in functions if found == file)
        print(f"{file}: {', '.join(names)}")


if __name__ == "__main__":
    main()
