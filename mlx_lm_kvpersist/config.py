"""The plugin's options, and defaults that depend on the device.

Some commands must not import MLX, so this module imports MLX only inside functions.
"""

from __future__ import annotations

import os
import shutil
from argparse import SUPPRESS, Action, ArgumentParser, Namespace
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import platformdirs

from .api.admin import KEY_VARIABLE
from .cache.geometry.precision import FULL_BITS, GROUP_SIZES, PrecisionChoice
from .errors import ConfigError
from .store.encryption import read_key, sqlcipher
from .store.folder import PLAIN, Encryption
from .store.objects import Objects
from .store.records import StoreLimits
from .units import parse_file, parse_folder, parse_size, show_bytes

if TYPE_CHECKING:
    from .cache.live.attention import Strategy

GIB = 1 << 30
DEFAULT_MAX_DISK_BYTES = 64 * GIB
LEAST_BYTES = 128 << 20
"""The least value that --kvpersist-memory accepts."""
MAX_LOSS_S = 2.0
"""After kill -9, a conversation with windows or recurrent layers computes at most this number of
seconds again: a checkpoint that takes longer to compute is not postponed."""
MIN_PREFILL_BYTES = GIB // 2
"""A chunk of a prompt may take this much memory, or a sixteenth of the device's if that is more."""
KV_BITS = {
    "k8v4": PrecisionChoice(),
    "4": PrecisionChoice(4, 4),
    "k6v4": PrecisionChoice(6, 4),
    "8": PrecisionChoice(8, 8),
    "16": PrecisionChoice(FULL_BITS, FULL_BITS),
}
"""Bits of keys and of values, by their spelling on the command line. The first is the default."""
DEFAULT_BITS = next(iter(KV_BITS))


@dataclass(frozen=True)
class Config:
    """The plugin's options as values."""

    folder: Path
    limits: StoreLimits
    precision: PrecisionChoice
    store_text: bool = True
    isolate_sessions: bool = False
    namespace_by_key: bool = False
    stock_kv_bits: int | None = None
    """`--kv-bits`, for models that the plugin does not support."""
    api_key: str | None = field(default=None, repr=False)
    show_text: bool = False
    warm: tuple[Path, ...] = ()
    """Files of prompts that are computed at the start."""
    prompt_lookup: bool = True
    """Whether to draft by prompt lookup: the ids after an earlier copy of the last ids."""
    attention: Strategy | Literal["auto"] = "auto"
    """"auto", or the strategy (see cache/live/attention.py) of every layer that supports it."""
    max_stall_s: float = 0.25
    max_prefill_bytes: int = GIB
    memory_bytes: int | None = None
    """The budget for everything except the model's weights; None: see `memory.total_bytes`."""
    refuses: bool = False
    """Whether a request is refused, instead of waiting, if memory does not suffice."""
    encryption: Encryption = PLAIN
    shared: tuple[Objects, Encryption, int | None] | None = None
    """The store that several servers use, its encryption, and the maximum size of its objects."""


def _option(meaning: str, parse: Any = None, **argument: Any) -> dict[str, Any]:
    metavars: dict[Any, str] = {parse_folder: "FOLDER", parse_size: "SIZE", parse_file: "FILE"}
    typed = {"type": parse, "metavar": metavars.get(parse)} if parse else {}
    return {"help": meaning, **typed, **argument}


_STORAGE = {
    "dir": _option("Where conversations are kept (default: the user's cache folder)", parse_folder),
    "ram": _option(
        "Maximum memory for blocks of conversations that are not running, such as 8G "
        "(default: an eighth of the device's memory, at most half of --kvpersist-memory)",
        parse_size,
    ),
    "memory": _option(
        "Maximum memory for running conversations, stored blocks and prompts that are computed, "
        "without the model's weights (default: the memory that the device offers, minus the "
        "weights and a reserve)",
        parse_size,
    ),
    "memory-policy": _option(
        "Whether a request that does not fit into memory waits, or is refused with status "
        "503 (default: wait)",
        choices=("wait", "refuse"),
        default="wait",
    ),
    "disk": _option(
        "Maximum disk space for conversations, index and quarantine included (default: a tenth "
        "of the volume, at most 64G)",
        parse_size,
    ),
    "min-free": _option(
        "Disk space to leave free on the volume (default: 10G)", parse_size, default="10G"
    ),
    "shared": _option(
        "A bucket (s3://, gs://, az://) or a folder in which servers share stored blocks",
        metavar="URL",
    ),
    "shared-key": _option(
        "The key file that encrypts shared objects; mlx-lm-kvpersist key FILE makes a key file; "
        "plain: no encryption",
        lambda text: text if text == "plain" else parse_file(text),
        metavar="FILE|plain",
    ),
    "shared-size": _option(
        "Maximum size of all shared objects; the oldest are removed first (default: no limit)",
        parse_size,
    ),
    "warm": _option(
        "Compute and pin the beginning of prompts when the server starts, as mlx-lm-kvpersist "
        "warm FILE does; can be given more than once",
        parse_file,
        action="append",
        default=[],
    ),
}
_SERVING = {
    "kv-bits": _option(
        "Bits of each key and value; k8v4: 8 for keys, 4 for values; k6v4: 6 for keys, 4 for "
        "values; 16: the model's own precision (default: the value of --kv-bits, or k8v4)",
        choices=KV_BITS,
    ),
    "max-stall-ms": _option(
        "About how long running replies may wait for a token while a prompt is computed or "
        "restored; less time makes that prompt slower (default: 250)",
        float,
        default=250,
        metavar="MS",
    ),
    "attention": _option(
        "How attention reads quantized keys and values: dequantize a layer, read it quantized "
        "(packed), or dequantize a few heads at a time (tiled). Layers that cannot do this are "
        "dequantized (default: auto, a fixed policy for each backend)",
        choices=("auto", "dequantize", "packed", "tiled"),
        default="auto",
    ),
    "draft": _option(
        "Whether to draft text that a reply repeats from its own or a stored conversation, several "
        "tokens a step. Drafting pauses if it saves no time or another request runs, and is off on "
        "CUDA (default: auto)",
        choices=("auto", "off"),
        default="auto",
    ),
    "served-name": _option(
        "Another name of the model, listed first in /v1/models; give it to all servers behind a "
        "router (default: none)",
        dest="served_name",
        metavar="NAME",
    ),
}
_ACCESS = {
    "encrypt": _option(
        "The key file that encrypts a new folder, and opens it later; "
        "mlx-lm-kvpersist key FILE makes a key file (default: not encrypted)",
        parse_file,
        metavar="KEYFILE",
    ),
    "no-text": _option(
        "Store token ids only, no text; conversations are then found by their ids",
        action="store_true",
    ),
    "isolation": _option(
        "shared: equal beginnings are stored once for all sessions; session: each session "
        "finds only its own blocks, and a request without a session finds nothing "
        "(default: shared)",
        choices=("shared", "session"),
        default="shared",
    ),
    "namespace-by-key": _option(
        "Share nothing between requests with different API keys", action="store_true"
    ),
    "show-text": _option(
        "Let the page and /v1/kvpersist/requests quote prompts: the first words of sessions, and "
        "the words at which prompts differ from stored prompts",
        action="store_true",
    ),
}
OPTIONS = {**_STORAGE, **_SERVING, **_ACCESS}
"""The arguments of argparse for each option, by its name without `--kvpersist-`."""
GROUPS = {"Where and how much": _STORAGE, "Serving": _SERVING, "Who may see what": _ACCESS}
"""The options, by their heading in the docs."""
RARE = "memory-policy shared-size attention draft served-name isolation show-text".split()
"""Options that --help-all shows, and --help does not."""


class HelpAll(Action):
    """Prints the help with the rare options. `const` maps each rare option's name to its action."""

    def __call__(self, parser: ArgumentParser, *args: Any) -> None:
        for name, action in self.const.items():
            action.help = OPTIONS[name]["help"]
        self.help = SUPPRESS  # this option is not needed in its own help
        parser.print_help()
        parser.exit()


def add_options(parser: ArgumentParser, *names: str) -> None:
    """Add the named options to a parser; without names, add all options, as one group."""
    for name in names:
        parser.add_argument(f"--kvpersist-{name}", **OPTIONS[name])
    if names:
        return
    group = parser.add_argument_group(
        "kvpersist", "Keep the KV cache of every conversation, quantized, across restarts."
    )
    rare: dict[str, Action] = {}
    help_all = "Show this help with the plugin's rare options, too"
    group.add_argument("--help-all", action=HelpAll, nargs=0, const=rare, help=help_all)
    for name, argument in OPTIONS.items():
        action = group.add_argument(f"--kvpersist-{name}", **argument)
        if name in RARE:
            rare[name], action.help = action, SUPPRESS


def from_args(args: Namespace, rank: int = 0, n_ranks: int = 1) -> Config:
    """Read the parsed command line. Raises ConfigError if options contradict each other.

    `rank` is the number of this process among the `n_ranks` that compute the model. `args.kv_bits`
    is set to None: mlx-lm's own quantizing would turn batching off.
    """
    if n_ranks > 1 and args.kvpersist_shared is not None:
        raise ConfigError(
            "--kvpersist-shared stores whole models' conversations, and each process of mlx.launch "
            "has a part of a model; leave it out, or serve from one process"
        )
    precision, stock_kv_bits = precision_of(args), getattr(args, "kv_bits", None)
    args.kv_bits = None
    stall_ms = args.kvpersist_max_stall_ms
    if not 10 <= stall_ms <= 60_000:  # most devices need more than 10 ms for a token
        wrong = f"--kvpersist-max-stall-ms {stall_ms:g}"
        raise ConfigError(f"{wrong} is out of range; give 10 to 60000")
    if args.served_name is not None and (not args.served_name or getattr(args, "model", 0) is None):
        raise ConfigError(
            "--kvpersist-served-name NAME is a name of --model; give both, or neither"
        )
    folder = args.kvpersist_dir or default_folder()
    if n_ranks > 1:
        folder /= f"rank-{rank}-of-{n_ranks}"
    ram, memory = args.kvpersist_ram, args.kvpersist_memory
    if memory is not None and memory < LEAST_BYTES:
        shown_memory, least = show_bytes(memory), show_bytes(LEAST_BYTES)
        raise ConfigError(f"--kvpersist-memory {shown_memory} is too little; give at least {least}")
    if ram is None:
        ram = getattr(args, "prompt_cache_bytes", None) or device_memory_bytes() // 8
        ram = ram if memory is None else min(ram, memory // 2)
    elif memory is not None and ram > memory:
        raise ConfigError(
            f"--kvpersist-ram {show_bytes(ram)} cannot be larger than --kvpersist-memory, which is "
            f"{show_bytes(memory)}; give less RAM, or more memory"
        )
    return Config(
        folder=folder,
        limits=replace(limits_of(args, folder), max_ram_bytes=ram, max_loss_s=MAX_LOSS_S),
        store_text=not args.kvpersist_no_text,
        namespace_by_key=args.kvpersist_namespace_by_key,
        api_key=os.environ.get(KEY_VARIABLE, "").strip() or None,
        show_text=args.kvpersist_show_text,
        warm=_warm(args),
        isolate_sessions=args.kvpersist_isolation == "session",
        precision=precision,
        stock_kv_bits=stock_kv_bits,
        attention=args.kvpersist_attention,
        prompt_lookup=args.kvpersist_draft == "auto" and n_ranks == 1,
        max_stall_s=stall_ms / 1e3,
        max_prefill_bytes=max(MIN_PREFILL_BYTES, device_memory_bytes() // 16),
        memory_bytes=memory,
        refuses=args.kvpersist_memory_policy == "refuse",
        encryption=encryption_of(args),
        shared=_shared(args),
    )


def _shared(args: Namespace) -> tuple[Objects, Encryption, int | None] | None:
    url, key = args.kvpersist_shared, args.kvpersist_shared_key
    max_bytes = args.kvpersist_shared_size
    if url is None:
        if key is not None or max_bytes is not None:
            raise ConfigError("--kvpersist-shared-key and -size need --kvpersist-shared URL")
        return None
    if key is None:
        raise ConfigError(
            "--kvpersist-shared needs a key that all its servers have: make one with "
            "mlx-lm-kvpersist key FILE and give --kvpersist-shared-key FILE; or, if everybody "
            "who can reach the store may read all conversations, give --kvpersist-shared-key plain"
        )
    return Objects(url), PLAIN if key == "plain" else read_key(key), max_bytes


def encryption_of(args: Namespace) -> Encryption:
    if (key := args.kvpersist_encrypt) is None:
        return PLAIN
    sqlcipher()  # a missing package is noticed before a folder is made
    return read_key(key)


def precision_of(args: Namespace) -> PrecisionChoice:
    bits, group_size = args.kvpersist_kv_bits, getattr(args, "kv_group_size", None)
    if getattr(args, "kv_bits", None) is not None:
        bits = bits or str(args.kv_bits)
    if group_size == 64:  # stock's default: the size of the model's heads decides instead
        group_size = None
    bits = bits or DEFAULT_BITS
    if bits not in KV_BITS:
        raise ConfigError(
            f"--kv-bits {bits} is not supported; use 4 or 8, or --kvpersist-kv-bits in its place"
        )
    if group_size not in (None, *GROUP_SIZES):
        raise ConfigError(
            f"--kv-group-size {group_size} is not supported; use one of "
            f"{', '.join(map(str, sorted(GROUP_SIZES)))}"
        )
    return replace(KV_BITS[bits], group_size=group_size)


def _warm(args: Namespace) -> tuple[Path, ...]:
    files = tuple(args.kvpersist_warm)
    for file in files:
        if not file.is_file():
            raise ConfigError(f"--kvpersist-warm {file} is not a file; name a file with a prompt")
    if files and getattr(args, "model", None) is None:
        raise ConfigError("--kvpersist-warm needs --model: it says whose prompts are computed")
    if files and (args.kvpersist_isolation == "session" or args.kvpersist_namespace_by_key):
        raise ConfigError(
            "--kvpersist-warm computes for all sessions and keys; leave out --kvpersist-isolation "
            "session and --kvpersist-namespace-by-key"
        )
    return files


def default_folder() -> Path:
    """Return the default of --kvpersist-dir. Raises ConfigError if the path is not absolute."""
    folder = Path(platformdirs.user_cache_dir("mlx-lm-kvpersist"))
    if not folder.is_absolute():
        raise ConfigError(
            f"the user's cache folder is {str(folder.parent)!r}, not an absolute path; set "
            "XDG_CACHE_HOME or HOME to one, or name a folder with --kvpersist-dir"
        )
    return folder


def device_memory_bytes() -> int:
    import mlx.core as mx

    info = mx.device_info()
    size = info.get("memory_size") or info.get("total_memory")  # Metal and CUDA report it
    return int(size) if size else os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def limits_of(args: Namespace, folder: Path) -> StoreLimits:
    """Return the limits on disk; by default a tenth of the volume of `folder`, at most 64 GiB."""
    if (disk := args.kvpersist_disk) is None:
        while not folder.exists():
            folder = folder.parent
        disk = min(shutil.disk_usage(folder).total // 10, DEFAULT_MAX_DISK_BYTES)
    return StoreLimits(0, disk, args.kvpersist_min_free)
