"""The plugin's options, and defaults that depend on the device.

The commands take some of these options, too, so nothing of MLX is imported before it is needed.
"""

from __future__ import annotations

import os
import re
import shutil
from argparse import SUPPRESS, Action, ArgumentParser, Namespace
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import platformdirs

from .api.admin import KEY_VARIABLE
from .cache.geometry.precision import FULL_BITS, GROUP_SIZES, PrecisionChoice
from .errors import ConfigError
from .store.encryption import PLAIN, Encryption, read_key, sqlcipher
from .store.objects import Objects
from .store.records import StoreLimits
from .units import parse_folder, parse_size, show_bytes

if TYPE_CHECKING:
    from .cache.live.attention import Strategy

GIB = 1 << 30
DEFAULT_MAX_DISK_BYTES = 64 * GIB
LEAST_BYTES = 128 << 20
"""Less memory than this cannot be asked for."""
MAX_LOSS_S = 2.0
"""Seconds of computing that kill -9 may undo of a conversation with windows or recurrent layers: if
computing would take longer, its checkpoint is written when it rests."""
MIN_PREFILL_BYTES = GIB // 2
"""A chunk of a prompt may take this much memory, or a sixteenth of the device's."""
PLAIN_KEY = Path("plain")
"""Stands for a key file if what is shared is not encrypted."""
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
    """`--kv-bits`, for models that are served as stock does."""
    api_key: str | None = field(default=None, repr=False)
    show_text: bool = False
    warm: tuple[Path, ...] = ()
    """Files of prompts that are computed at the start."""
    prompt_lookup: bool = True
    """Whether the ids that followed a reply's last ids before are checked as drafts."""
    attention: Strategy | Literal["auto"] = "auto"
    """"auto", or the strategy (see cache/live/attention.py) that every layer takes if it can."""
    max_stall_s: float = 0.25
    max_prefill_bytes: int = GIB
    memory_bytes: int | None = None
    """For all but the model's weights; None: what the device leaves."""
    refuses: bool = False
    """Whether a request that memory does not suffice for is refused, and does not wait."""
    encryption: Encryption = PLAIN
    shared: tuple[Objects, Encryption, int | None] | None = None
    """The store that other servers use, too, its encryption, and the most bytes of its objects."""


_METAVARS: dict[Any, str] = {parse_folder: "FOLDER", parse_size: "SIZE", Path: "FILE"}
RARE = "memory-policy shared-size attention draft served-name isolation show-text".split()
"""Options that --help-all shows, and --help does not."""
_LEAVE_OUT = "leave it out"
REMOVED = {
    "max-writes-per-hour": f"{_LEAVE_OUT}; the page and `why` show what was written in an hour",
    "model-share": f"{_LEAVE_OUT}; a model may fill three quarters of --kvpersist-disk while "
    "others have blocks there",
    "wired": f"{_LEAVE_OUT}; models above half of the memory that the device recommends are wired, "
    "and a plugin can choose another limit (hook wired_limit)",
    "max-loss-s": f"{_LEAVE_OUT}; kill -9 may undo 2 seconds of computing",
    "kv-rotate": f"{_LEAVE_OUT}; keys and values are always rotated before they are quantized",
    "shared-plain": "give --kvpersist-shared-key plain",
    "fsync": f"{_LEAVE_OUT}; checksums find what a power failure tears",
    "verify": f"{_LEAVE_OUT}; all that is restored is checked",
    "kv-group-size": "give --kv-group-size",
    "session-header": f"{_LEAVE_OUT}; clients name their session in X-Session-ID",
    "normalise": f"{_LEAVE_OUT}; no prompt is changed",
    "api-key": f"set {KEY_VARIABLE} in the environment",
    "evict": f"{_LEAVE_OUT}; the least recently used is evicted first",
    "min-reuse": f"{_LEAVE_OUT}; measured speeds decide what is restored",
    "pin-system": "give --kvpersist-warm FILE, which pins a beginning",
    "kv-target": "choose a precision with --kvpersist-kv-bits",
    "kv-measure-s": f"{_LEAVE_OUT}; nothing is measured when a model is loaded",
}
"""Options of earlier versions, and what to do instead."""


class RemovedOption(Action):
    """Ends the process with what to do instead."""

    def __call__(self, parser: ArgumentParser, *args: Any) -> None:
        parser.error(with_remedies(f"unrecognized arguments: {self.option_strings[0]}"))


def with_remedies(message: str) -> str:
    """Return an error of argparse with what to do about each removed option that it names."""
    named = (name for name in REMOVED if re.search(rf"--kvpersist-{name}\b(?!-)", message))
    remedies = (f"; --kvpersist-{name} was removed: {REMOVED[name]}" for name in named)
    return message + "".join(remedies)


class HelpAll(Action):
    """Prints the help with the rare options, too. `const` has these, with their help."""

    def __call__(self, parser: ArgumentParser, *args: Any) -> None:
        for action, meaning in self.const:
            action.help = meaning
        self.help = SUPPRESS  # the reader has found it
        parser.print_help()
        parser.exit()


def add_options(parser: ArgumentParser, *names: str) -> None:
    """Add the plugin's options, in a group of their own, or those of these names alone."""
    group: Any = parser
    hidden: list[tuple[Action, str]] = []
    if not names:
        group = parser.add_argument_group(
            "kvpersist", "Keep the KV cache of every conversation, quantized, across restarts."
        )
        group.add_argument(
            "--help-all",
            action=HelpAll,
            nargs=0,
            const=hidden,
            help="Show this help with the plugin's rare options, too",
        )
        for name in REMOVED:
            group.add_argument(
                f"--kvpersist-{name}",
                action=RemovedOption,
                nargs="?",
                default=SUPPRESS,
                help=SUPPRESS,
            )

    def add(name: str, meaning: str, **argument: Any) -> None:
        if names and name not in names:
            return
        if (metavar := _METAVARS.get(argument.get("type"))) is not None:
            argument.setdefault("metavar", metavar)
        action = group.add_argument(f"--kvpersist-{name}", help=meaning, **argument)
        if name in RARE and not names:
            hidden.append((action, meaning))
            action.help = SUPPRESS

    add("dir", "Where conversations are kept (default: the user's cache folder)", type=parse_folder)
    add(
        "encrypt",
        "The key file that encrypts what is kept in the folder, from the first start on; "
        "mlx-lm-kvpersist key FILE makes one (default: not encrypted)",
        type=Path,
        metavar="KEYFILE",
    )
    add(
        "ram",
        "Most memory for blocks of conversations that are not running, such as 8G "
        "(default: an eighth of the device's memory, at most half of --kvpersist-memory)",
        type=parse_size,
    )
    add(
        "memory",
        "Most memory for everything but the model: running conversations and those that are "
        "not, prompts that are computed (default: what the device leaves, less a reserve)",
        type=parse_size,
    )
    add(
        "memory-policy",
        "What a request does that does not fit into memory beside those that run: wait, or be "
        "refused with status 503 (default: wait)",
        choices=("wait", "refuse"),
        default="wait",
    )
    add(
        "disk",
        "Most disk space for conversations, index and quarantine included (default: a tenth "
        "of the volume, at most 64G)",
        type=parse_size,
    )
    add(
        "min-free",
        "Disk space to leave free on the volume (default: 10G)",
        type=parse_size,
        default="10G",
    )
    add(
        "shared",
        "A bucket (s3://, gs://, az://) or a folder in which servers share what they computed",
        metavar="URL",
    )
    add(
        "shared-key",
        "The key file that encrypts what is shared; mlx-lm-kvpersist key FILE makes one; plain: no "
        "encryption",
        type=Path,
        metavar="FILE|plain",
    )
    add(
        "shared-size",
        "Most that all servers keep there: what was not used for the longest is removed "
        "(default: no limit)",
        type=parse_size,
    )
    add(
        "kv-bits",
        "Bits of each key and value; k8v4: 8 for keys, 4 for values; k6v4: 6 for keys, 4 for "
        "values; 16: the model's own precision (default: that of --kv-bits, or k8v4)",
        choices=KV_BITS,
    )
    add(
        "max-stall-ms",
        "Longest that running replies wait for a token while a prompt is computed or "
        "restored; less makes that prompt slower (default: 250)",
        type=float,
        default=250,
        metavar="MS",
    )
    add(
        "attention",
        "How layers attend over quantized keys: dequantize one layer at a time, read them "
        "packed, or dequantize in tiles, if the model and the device can (default: a fixed "
        "policy for each backend)",
        choices=("auto", "dequantize", "packed", "tiled"),
        default="auto",
    )
    add(
        "draft",
        "Draft what a reply repeats of its conversation or of stored ones, and check several "
        "tokens in one step, while no other request runs; pauses if that does not pay, and is off "
        "on CUDA (default: auto)",
        choices=("auto", "off"),
        default="auto",
    )
    add(
        "served-name",
        "A further name of the model, the first in /v1/models: one for several servers behind a "
        "router (default: none)",
        dest="served_name",
        metavar="NAME",
    )
    add(
        "no-text",
        "Store token ids only, no text; conversations are then found by their ids",
        action="store_true",
    )
    add(
        "isolation",
        "Whether equal beginnings are stored once for all sessions, or each session "
        "finds only what it stored itself, and a request without a session finds nothing "
        "(default: shared)",
        choices=("shared", "session"),
        default="shared",
    )
    add(
        "namespace-by-key",
        "Share nothing between requests with different API keys",
        action="store_true",
    )
    add(
        "warm",
        "Compute and pin a beginning at the start, as mlx-lm-kvpersist warm FILE "
        "does; can be given more than once",
        type=Path,
        action="append",
        default=[],
    )
    add(
        "show-text",
        "Let the page and /v1/kvpersist/requests quote prompts: the first words of sessions, and "
        "where prompts differ from what is stored",
        action="store_true",
    )


def from_args(args: Namespace, rank: int = 0, n_ranks: int = 1) -> Config:
    """Read the parsed command line. Raises ConfigError if options contradict each other.

    `rank` is the number of this process among the `n_ranks` that compute the model. `args.kv_bits`
    is set to None: stock's own quantizing turns batching off.
    """
    if n_ranks > 1 and args.kvpersist_shared is not None:
        raise ConfigError(
            "--kvpersist-shared keeps whole models' conversations, and each process of mlx.launch "
            "has a part of one; leave it out, or serve from one process"
        )
    precision, stock_kv_bits = precision_of(args), getattr(args, "kv_bits", None)
    args.kv_bits = None
    stall_ms = args.kvpersist_max_stall_ms
    if not 10 <= stall_ms <= 60_000:  # less is less than a token takes on most devices
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
            f"--kvpersist-ram {show_bytes(ram)} is a part of --kvpersist-memory, which is "
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
    return Objects(url), PLAIN if key == PLAIN_KEY else read_key(key), max_bytes


def encryption_of(args: Namespace) -> Encryption:
    """Return the encryption of the folder that the options name: none without a key file."""
    if (key := args.kvpersist_encrypt) is None:
        return PLAIN
    sqlcipher()  # it is missed before a folder is made
    return read_key(key)


def precision_of(args: Namespace) -> PrecisionChoice:
    bits, group_size = args.kvpersist_kv_bits, None
    if getattr(args, "kv_bits", None) is not None:
        bits = bits or str(args.kv_bits)
        # Stock's default, 64, says nothing of what the model's heads allow.
        if args.kv_group_size != 64:
            group_size = args.kv_group_size
    bits = bits or DEFAULT_BITS
    if bits not in KV_BITS:
        raise ConfigError(
            f"--kv-bits {bits} cannot be kept; give 4 or 8, or --kvpersist-kv-bits in its place"
        )
    if group_size not in (None, *GROUP_SIZES):
        raise ConfigError(
            f"--kv-group-size {group_size} cannot be kept; choose one of "
            f"{', '.join(map(str, sorted(GROUP_SIZES)))}"
        )
    return replace(KV_BITS[bits], group_size=group_size)


def _warm(args: Namespace) -> tuple[Path, ...]:
    files = tuple(args.kvpersist_warm)
    for file in files:
        if not file.is_file():
            raise ConfigError(f"--kvpersist-warm {file} is no file; name one with a prompt")
    if files and getattr(args, "model", None) is None:
        raise ConfigError("--kvpersist-warm needs --model: it says whose prompts are computed")
    if files and (args.kvpersist_isolation == "session" or args.kvpersist_namespace_by_key):
        raise ConfigError(
            "--kvpersist-warm computes for all sessions and keys; leave out --kvpersist-isolation "
            "session and --kvpersist-namespace-by-key"
        )
    return files


def default_folder() -> Path:
    """Return the default of --kvpersist-dir. Raises ConfigError if it is no absolute path."""
    folder = Path(platformdirs.user_cache_dir("mlx-lm-kvpersist"))
    if not folder.is_absolute():
        raise ConfigError(
            f"the user's cache folder is {str(folder.parent)!r}, no absolute path; set "
            "XDG_CACHE_HOME or HOME to one, or name a folder with --kvpersist-dir"
        )
    return folder


def device_memory_bytes() -> int:
    """Return the memory of MLX's device, or the machine's if the device does not say."""
    import mlx.core as mx

    info = mx.device_info()
    size = info.get("memory_size") or info.get("total_memory")  # by Metal, and by CUDA
    return int(size) if size else os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def limits_of(args: Namespace, folder: Path) -> StoreLimits:
    """Return the limits on disk; by default a tenth of the volume of `folder`, at most 64 GiB."""
    if (disk := args.kvpersist_disk) is None:
        while not folder.exists():
            folder = folder.parent
        disk = min(shutil.disk_usage(folder).total // 10, DEFAULT_MAX_DISK_BYTES)
    return StoreLimits(0, disk, args.kvpersist_min_free)
