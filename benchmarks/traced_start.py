"""`mlx_lm.server` that times a few functions of its start; see `benchmarks.start`.

    TRACE_FILE=… python -m benchmarks.traced_start --model … [--plugin kvpersist]

After the first reply the times are written as a JSON object: by stage, wall and CPU seconds. No
stage counts what another one counts.
"""

from __future__ import annotations

import functools
import importlib
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

BEGAN_S, BEGAN_CPU_S = time.perf_counter(), time.process_time()
TRACE_FILE = "BENCHMARK_TRACE_FILE"
"""The environment variable that names the file."""

_STAGES = (
    ("mlx_lm_kvpersist.plugin:KVPersistPlugin.configure", "options, opening the store"),
    ("mlx_lm_kvpersist.host.patching.patches:PatchChecks.self_test", "probes of patches"),
    ("mlx_lm.server:load", "loading the model"),
    ("mlx_lm_kvpersist.plugin:KVPersistPlugin.model_loaded", "what is known of the model"),
    ("mlx_lm_kvpersist.request.serving:Serving.look_up", "looking up the prompt"),
    ("mlx_lm_kvpersist.request.serving:ServedRequest.enter", "restoring the prompt"),
)


class Trace:
    """Seconds by stage."""

    def __init__(self) -> None:
        self.stages: dict[str, tuple[float, float]] = {}
        self._inside = 0.0, 0.0

    def timed(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def run(*args: Any, **named: Any) -> Any:
            before, self._inside = self._inside, (0.0, 0.0)
            began = time.perf_counter(), time.process_time()
            try:
                return function(*args, **named)
            finally:
                took = time.perf_counter() - began[0], time.process_time() - began[1]
                own = took[0] - self._inside[0], took[1] - self._inside[1]
                known = self.stages.get(name, (0.0, 0.0))
                self.stages[name] = known[0] + own[0], known[1] + own[1]
                self._inside = before[0] + took[0], before[1] + took[1]

        return run

    def write(self, path: Path) -> None:
        temporary = path.with_suffix(".tmp")
        temporary.write_text(json.dumps(self.stages), encoding="utf-8")
        os.replace(temporary, path)


def main() -> None:
    trace = Trace()
    trace.stages["interpreter"] = BEGAN_CPU_S, BEGAN_CPU_S
    sys.argv = ["mlx_lm.server", *sys.argv[1:]]
    is_ours = "--plugin" in sys.argv
    if is_ours:
        from mlx_lm_kvpersist import _startup

        _startup.install()
    server = trace.timed("imports of mlx-lm", importlib.import_module)("mlx_lm.server")
    if is_ours:
        for module in ("mlx_lm_kvpersist.host.patching.patches", "mlx_lm_kvpersist.plugin"):
            trace.timed("imports of the plugin", importlib.import_module)(module)
    for target, stage in _STAGES:
        module, _, path = target.partition(":")
        if not is_ours and not module.startswith("mlx_lm."):
            continue
        *outer, name = path.split(".")
        holder: Any = functools.reduce(getattr, outer, importlib.import_module(module))
        function = getattr(holder, name)
        # Pluggy finds a hook by a mark, which functools.wraps keeps.
        setattr(holder, name, trace.timed(stage, function))
    complete = server.APIHandler.handle_completion

    @functools.wraps(complete)
    def completed(*args: Any, **named: Any) -> Any:
        try:
            return complete(*args, **named)
        finally:
            trace.write(Path(os.environ[TRACE_FILE]))

    server.APIHandler.handle_completion = completed
    server.main()


if __name__ == "__main__":
    main()
