"""`mlx-lm-kvpersist selftest`: check the patches, the plugins and the numbers.

With --machine it also checks whether MLX computes correctly on this machine, and how fast.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import io
import resource
import sys
import tempfile
import timeit
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from itertools import product
from typing import Any
from unittest import mock

import mlx.core as mx

from ..cache.geometry.precision import KVPrecision
from ..cache.live.attention import AttentionShape, forced_plan
from ..cache.live.packed import backend
from ..cache.measuring.attention_check import wrong_strategies
from ..config import add_options, precision_of
from ..errors import PatchNotEffective, SelfTestFailed
from ..host import install, uninstall
from ..host.patching.patches import PATCHES, Patch, PatchSet, look_up
from ..host.stopping import requested_plugins
from ..round_trip import check_round_trip
from ..units import show_bytes
from .doctor import PLUGIN, Finding, ask, mlx_lm, report, tried
from .machine import device, versions
from .output import Report
from .quality_checks import server_attention

HEADS = {64: 64, 72: 32, 80: 32, 96: 32, 128: 64, 192: 64, 256: 128}
"""Head sizes, each with the group size of its quantization."""
BITS = (4, 5, 6, 8)
N_KEYS = 32_768
ATTENTION = mx.fast.scaled_dot_product_attention
_ASK_MACOS = "sysctl hw.model iogpu.wired_limit_mb kern.memorystatus_vm_pressure_level; pmset -g"


def run(args: argparse.Namespace) -> Report:
    plugins = requested_plugins(args.server_options) or [PLUGIN]
    command = " ".join(["mlx_lm.server", *(f"--plugin {name}" for name in plugins)])
    findings = [*(machine_findings() if args.machine else ()), *run_selftest(args.server_options)]
    return report(findings, command, f"{command} --model mlx-community/Qwen3-8B-4bit")


def run_selftest(server_options: Sequence[str] = ()) -> list[Finding]:
    findings = [
        mlx_lm(),
        *(tried(f"patch {patch.name}", partial(check_patch, patch)) for patch in PATCHES),
        tried("startup", partial(check_startup, server_options)),
    ]
    if PLUGIN in (requested_plugins(server_options) or [PLUGIN]):
        findings.append(tried("round trip", partial(check_numbers, server_options)))
    return findings


def check_patch(patch: Patch) -> None:
    """Apply a patch alone, and undo it.

    Raises a PatchError if the host differs or the patch does nothing. Raises SelfTestFailed if the
    probe also passes without the patch, or if a change remains after undo.
    """
    patches, stock = PatchSet(), look_up(patch.module, patch.attribute)
    patch.check_host()
    _expect_failure(patch, "before the patch")
    try:
        patches.apply([patch])
        patch.check()
    finally:
        patches.undo()
    if look_up(patch.module, patch.attribute) is not stock:
        raise SelfTestFailed(f"patch {patch.name}, undone, leaves {patch.target} replaced")
    _expect_failure(patch, "after undo")


def _expect_failure(patch: Patch, when: str) -> None:
    try:
        patch.check()
    except PatchNotEffective:
        return
    raise SelfTestFailed(
        f"the probe of patch {patch.name} passes {when}, so it proves nothing; "
        f"expected {patch.target} to be the stock one (is the server patched already?)"
    )


def check_startup(server_options: Sequence[str] = ()) -> None:
    """Run the server's `main` with plugins and without a model, until it listens.

    Raises the error that stopped `main`. If `server_options` name no plugin, kvpersist starts with
    a temporary store.
    """
    plugins = requested_plugins(server_options)
    server = importlib.import_module("mlx_lm.server")
    install(plugins or [PLUGIN])
    stderr = io.StringIO()
    try:
        with tempfile.TemporaryDirectory(prefix="kvpersist-selftest-") as folder:
            own = [] if plugins else ["--plugin", PLUGIN, f"--kvpersist-dir={folder}/store"]
            listen = ["--host=127.0.0.1", "--port=0", "--log-level=ERROR"]
            with (
                mock.patch.object(sys, "argv", ["mlx_lm.server", *listen, *own, *server_options]),
                mock.patch.object(server.ThreadingHTTPServer, "serve_forever", _end_instead),
                contextlib.redirect_stderr(stderr),
                warnings.catch_warnings(),
            ):
                warnings.simplefilter("ignore")  # stock's warning about production use
                server.main()
    except _Listening:
        return
    except SystemExit as end:
        # argparse has printed the reason. If this package exits, `__cause__` has it.
        raise end.__cause__ or SelfTestFailed(stderr.getvalue().strip() or str(end)) from None
    finally:
        uninstall()
    raise SelfTestFailed("the server ended before it listened; expected it to start")


def check_numbers(server_options: Sequence[str] = ()) -> str:
    """Check a tiny model's numbers; return what was compared. Raises like `check_round_trip`."""
    parser = argparse.ArgumentParser()
    add_options(parser)
    args, _ = parser.parse_known_args(server_options)
    choice = precision_of(args)
    with server_attention():
        check_round_trip(choice, args.kvpersist_attention)
    return (
        f"{choice}: sequences that were batched, joined, cancelled, stored and restored have the "
        "logits of mlx-lm's own caches"
    )


class _Listening(BaseException):
    """The server has started and would now wait for requests."""


def _end_instead(server: Any, poll_interval: float = 0.5) -> None:
    server.server_close()
    raise _Listening


def machine_findings() -> list[Finding]:
    """Run all checks; this takes minutes."""
    checks = {"machine": conditions_of_machine, "out of memory": out_of_memory}
    checks |= {f"attention, heads of {dim}": partial(attention, dim) for dim in HEADS}
    checks |= {f"decoding, {bits} bits": partial(decoding, bits) for bits in BITS}
    checks |= {"a write": partial(writes, 1, 0), "a write after a read": partial(writes, 1, 1)}
    checks |= {"eight writes, each after a read": partial(writes, 8, 1)}
    return [tried(name, check) for name, check in checks.items()]


def conditions_of_machine() -> str:
    """Return the device, its limits and the versions; on macOS also settings that may slow MLX."""
    about = {**device(), "open files": resource.getrlimit(resource.RLIMIT_NOFILE)[0], **versions()}
    words = [f"{name} {value}" for name, value in about.items()]
    if sys.platform == "darwin":
        words += ask(["sh", "-c", _ASK_MACOS])[1].splitlines()
    return ", ".join(" ".join(word.split()) for word in words)


def out_of_memory() -> str:
    """Request 256 TiB in a separate process; return the error and the next result."""
    too_much = "mx.eval(mx.contiguous(mx.broadcast_to(mx.ones(1), (1 << 23, 1 << 23))))"
    code = f"import mlx.core as mx\ntry: {too_much}\nexcept Exception as e: print(e, mx.ones(1))"
    status, last_line = ask([sys.executable, "-c", code])
    return last_line or f"MLX ends the process with status {status}"


def attention(dim: int) -> str:
    """Compare attention over quantized keys with a reference; measure `ATTENTION`.

    If MLX does not fuse attention, the peak memory includes 16 MiB of scores.
    """
    # On CUDA no packed kernel is used, and MLX would compile each kernel for half a minute.
    plan = forced_plan("dequantize" if backend() == "cuda" else "packed")
    dtype = mx.float32 if backend() == "cpu" else mx.bfloat16
    wrong = []
    for bits, n_q_heads in product(BITS, (2, 8)):
        precision = KVPrecision.of(bits, HEADS[dim], rotated=True).fitted(dim, dim)
        shape = AttentionShape(n_q_heads, 2, dim, dim)
        strategies = wrong_strategies(plan, shape, precision, dtype)
        wrong += [f"{name}, {bits} bits, {n_q_heads} heads" for name in sorted(strategies)]
    if wrong:
        raise SelfTestFailed(f"wrong: {'; '.join(wrong)}; a server does not use these kernels")
    queries, keys = (mx.ones((1, 4, n, dim), mx.bfloat16) for n in (256, N_KEYS // 4))
    call = partial(ATTENTION, queries, keys, keys, scale=0.1, mask="causal")
    return f"right with {BITS} bits; a prompt's 256 tokens {measured(call)}"


def decoding(bits: int) -> str:
    """Measure parts of a decoding step: 32,768 keys, 32 query heads, 8 key heads of size 128."""
    queries, weights = (mx.random.normal((1, 8, 4, n)).astype(mx.bfloat16) for n in (128, N_KEYS))
    keys = mx.random.normal((1, 8, N_KEYS, 128)).astype(mx.bfloat16)
    packed = mx.quantize(keys, 64, bits)
    folded, scales, biases = (x.reshape(1, 8, 32, N_KEYS // 32, -1) for x in packed)
    parts = weights.reshape(1, 8, 4, 32, N_KEYS // 32).swapaxes(2, 3)
    multiply = partial(mx.quantized_matmul, group_size=64, bits=bits)
    calls: dict[str, Callable[[], object]] = {
        "nothing": lambda: queries + 1,
        "keys": lambda: multiply(queries, *packed, transpose=True),
        "values": lambda: multiply(weights, *packed, transpose=False),
        "values folded": lambda: multiply(parts, folded, scales, biases, transpose=False).sum(2),
        "dequantize": lambda: mx.dequantize(*packed, group_size=64, bits=bits),
        "slice": lambda: mx.contiguous(packed[0][:, :, :-8]),
        "16 bits": lambda: ATTENTION(queries.reshape(1, 32, 1, 128), keys, keys, scale=0.1),
    }
    return ", ".join(f"{name} {measured(call)}" for name, call in calls.items())


def writes(n_writes: int, n_reads: int) -> str:
    """Measure writes to a new cache of 64 MiB, each after `n_reads` sums over the cache."""

    def write() -> list[mx.array]:
        cache, sums = mx.zeros((1, 4, N_KEYS, 128)), list[mx.array]()
        for n in range(n_writes):
            sums += [cache.sum()] * n_reads
            cache[:, :, 256 * n : 256 * (n + 1)] = mx.ones((1, 4, 256, 128))
        return [cache, *sums]

    return measured(write)


def measured(compute: Callable[[], object]) -> str:
    """Return the least time of 4 calls (the first may compile), and the peak memory."""
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    times_s = timeit.repeat(lambda: mx.eval(compute()), number=1, repeat=4)
    return f"{min(times_s) * 1000:,.2f} ms {show_bytes(mx.get_peak_memory() - before)}"
