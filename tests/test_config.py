from __future__ import annotations

import re
import shutil
from argparse import ArgumentParser, Namespace
from pathlib import Path

import mlx.core as mx
import pytest

from mlx_lm_kvpersist import config
from mlx_lm_kvpersist.cache.geometry.precision import PrecisionChoice
from mlx_lm_kvpersist.errors import ConfigError
from mlx_lm_kvpersist.store.encryption import Cipher, new_key
from mlx_lm_kvpersist.store.folder import PLAIN

PLAIN_KEY = ("--kvpersist-shared-key", "plain")


def options() -> ArgumentParser:
    parser = ArgumentParser()
    config.add_options(parser)
    return parser


def parsed(*arguments: str, **stock: object) -> Namespace:
    args = options().parse_args(arguments)
    for name, value in stock.items():
        setattr(args, name, value)
    return args


def test_default_limits_depend_on_memory_and_disk(tmp_path: Path) -> None:
    made = config.from_args(parsed("--kvpersist-dir", str(tmp_path / "new" / "store")))
    assert made.limits.max_ram_bytes == config.device_memory_bytes() // 8
    assert 0 < made.limits.max_disk_bytes <= config.DEFAULT_MAX_DISK_BYTES
    assert made.limits.max_disk_bytes <= shutil.disk_usage(tmp_path).total // 10
    assert made.limits.min_free_bytes == 10 << 30
    assert made.store_text
    assert (made.precision, made.attention) == (PrecisionChoice(), "auto")
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--kvpersist-shared-size", "1G"), "need --kvpersist-shared URL"),
        (PLAIN_KEY, "need --kvpersist-shared URL"),
        (("--kvpersist-shared", "bucket"), "--kvpersist-shared needs a key"),
        (
            ("--kvpersist-shared", "x://y", "--kvpersist-shared-key", "plain"),
            "x://y cannot be used",
        ),
        (
            ("--kvpersist-shared", "", *PLAIN_KEY),
            "name a folder, or leave the option",
        ),
        (("--kvpersist-shared", "~none/x", *PLAIN_KEY), "give a folder"),
        (
            ("--kvpersist-shared", "file://nas/x", *PLAIN_KEY),
            "mount the share",
        ),
    ],
)
def test_incomplete_or_invalid_shared_store_options_are_refused(
    tmp_path: Path, options: tuple[str, ...], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        config.from_args(parsed("--kvpersist-dir", str(tmp_path), *options))


@pytest.mark.parametrize("name", ["memory_size", "total_memory"])
def test_device_memory_is_the_size_that_mlx_reports(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mx, "device_info", lambda: {name: 123})
    assert config.device_memory_bytes() == 123


def test_prompt_cache_bytes_limits_ram_unless_kvpersist_ram_is_given(tmp_path: Path) -> None:
    args = parsed("--kvpersist-dir", str(tmp_path), prompt_cache_bytes=123)
    assert config.from_args(args).limits.max_ram_bytes == 123
    args = parsed("--kvpersist-dir", str(tmp_path), "--kvpersist-ram", "1M", prompt_cache_bytes=123)
    assert config.from_args(args).limits.max_ram_bytes == 1 << 20


@pytest.mark.parametrize(("name", "model"), [("", "model"), ("team", None)])
def test_a_served_name_must_not_be_empty_and_needs_a_model(
    tmp_path: Path, name: str, model: str | None
) -> None:
    options = ("--kvpersist-dir", str(tmp_path), "--kvpersist-served-name", name)
    with pytest.raises(ConfigError, match="is a name of --model"):
        config.from_args(parsed(*options, model=model))


def precision(folder: Path, *arguments: str, **stock: object) -> PrecisionChoice:
    return config.from_args(parsed("--kvpersist-dir", str(folder), *arguments, **stock)).precision


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ((), PrecisionChoice(8, 4, None, True)),
        (("--kvpersist-kv-bits", "k8v4"), PrecisionChoice(8, 4, None, True)),
        (("--kvpersist-kv-bits", "4"), PrecisionChoice(4, 4, None, True)),
        (("--kvpersist-kv-bits", "k6v4"), PrecisionChoice(6, 4, None, True)),
        (("--kvpersist-kv-bits", "8"), PrecisionChoice(8, 8, None, True)),
        (("--kvpersist-kv-bits", "16"), PrecisionChoice(16, 16, None, True)),
    ],
)
def test_kv_bits_option_sets_the_precision(
    tmp_path: Path, arguments: tuple[str, ...], expected: PrecisionChoice
) -> None:
    choice = precision(tmp_path, *arguments)
    assert choice == expected
    assert choice.is_full_precision == ("16" in arguments)


def test_stock_kv_bits_set_the_precision_and_are_cleared(tmp_path: Path) -> None:
    """Stock's own quantization would turn batching off."""
    args = parsed("--kvpersist-dir", str(tmp_path), kv_bits=8, kv_group_size=32)
    assert config.from_args(args).precision == PrecisionChoice(8, 8, 32, True)
    assert args.kv_bits is None
    stock = {"kv_bits": 8, "kv_group_size": 64}
    assert precision(tmp_path, **stock) == PrecisionChoice(8, 8, None, True)
    k8v4 = precision(tmp_path, "--kvpersist-kv-bits", "k8v4", **stock)
    assert k8v4 == PrecisionChoice(8, 4, None, True)
    for bits in (3, 6):
        with pytest.raises(ConfigError, match=f"--kv-bits {bits} is not supported; use 4 or 8"):
            precision(tmp_path, kv_bits=bits, kv_group_size=64)
    k6v4 = precision(tmp_path, "--kvpersist-kv-bits", "k6v4", kv_bits=6, kv_group_size=64)
    assert k6v4 == PrecisionChoice(6, 4, None, True)
    grouped = precision(tmp_path, "--kvpersist-kv-bits", "8", kv_bits=None, kv_group_size=32)
    assert grouped == PrecisionChoice(8, 8, 32, True)
    with pytest.raises(ConfigError, match="use one of 32, 64, 128"):
        precision(tmp_path, kv_bits=4, kv_group_size=16)


@pytest.mark.parametrize("choice", ["auto", "dequantize", "packed", "tiled"])
def test_attention_option_is_read(tmp_path: Path, choice: str) -> None:
    args = parsed("--kvpersist-dir", str(tmp_path), "--kvpersist-attention", choice)
    assert config.from_args(args).attention == choice


@pytest.mark.parametrize(
    ("option", "value"),
    [
        *(("--kvpersist-kv-bits", bits) for bits in ("default", "auto", "5", "6", "k5v4", "k4v8")),
        ("--kvpersist-attention", "fused"),
    ],
)
def test_unknown_kv_bits_and_attention_are_refused(option: str, value: str) -> None:
    with pytest.raises(SystemExit):
        parsed(option, value)


@pytest.mark.parametrize("stall_ms", ["9", "60001", "nan", "-1"])
def test_max_stall_must_be_10_to_60000_ms(tmp_path: Path, stall_ms: str) -> None:
    args = parsed("--kvpersist-dir", str(tmp_path), f"--kvpersist-max-stall-ms={stall_ms}")
    with pytest.raises(ConfigError, match="out of range; give 10 to 60000"):
        config.from_args(args)
    args = parsed("--kvpersist-dir", str(tmp_path), "--kvpersist-max-stall-ms", "10")
    assert config.from_args(args).max_stall_s == 0.01


def test_operator_api_key_is_read_from_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def key() -> str | None:
        return config.from_args(parsed("--kvpersist-dir", str(tmp_path))).api_key

    monkeypatch.delenv("KVPERSIST_API_KEY", raising=False)
    assert key() is None
    monkeypatch.setenv("KVPERSIST_API_KEY", "of the environment\n")
    assert key() == "of the environment"
    monkeypatch.setenv("KVPERSIST_API_KEY", " ")
    assert key() is None


@pytest.mark.parametrize(
    ("options", "model", "message"),
    [
        ((), "m", None),
        ((), None, "needs --model"),
        (("--kvpersist-isolation", "session"), "m", "leave out --kvpersist-isolation"),
        (("--kvpersist-namespace-by-key",), "m", "leave out --kvpersist-isolation"),
        (("--kvpersist-warm", "no/such/file"), "m", "no/such/file is not a file"),
    ],
)
def test_a_warm_file_needs_a_model_and_no_isolation(
    tmp_path: Path, options: tuple[str, ...], model: str | None, message: str | None
) -> None:
    file = tmp_path / "prompt.json"
    file.write_text("[]")
    given = ("--kvpersist-dir", str(tmp_path), "--kvpersist-warm", str(file), *options)
    args = parsed(*given, model=model)
    if message is None:
        assert config.from_args(args).warm == (file,)
        return
    with pytest.raises(ConfigError, match=message):
        config.from_args(args)


def test_help_hides_rare_options_and_help_all_shows_them(
    capsys: pytest.CaptureFixture[str],
) -> None:
    help_texts = {}
    for flag in ("--help", "--help-all"):
        with pytest.raises(SystemExit) as end:
            parsed(flag)
        help_texts[flag] = capsys.readouterr().out
        assert end.value.code == 0 and "--kvpersist-kv-bits" in help_texts[flag]
    counts = {flag: len(re.findall(r"^  --", text, re.M)) for flag, text in help_texts.items()}
    assert counts == {"--help": 14, "--help-all": 20}
    for name in config.RARE:
        assert f"--kvpersist-{name}" in help_texts["--help-all"]
        assert f"--kvpersist-{name}" not in help_texts["--help"]
    assert parsed("--kvpersist-attention", "packed").kvpersist_attention == "packed"


def test_a_shared_store_can_be_unencrypted(tmp_path: Path) -> None:
    store = ("--kvpersist-dir", str(tmp_path), "--kvpersist-shared", str(tmp_path / "shared"))
    shared = config.from_args(parsed(*store, *PLAIN_KEY)).shared
    assert shared is not None and shared[1] is PLAIN


def test_a_key_file_named_plain_encrypts_the_shared_store(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    new_key(Path("plain"))
    store = ("--kvpersist-dir", str(tmp_path), "--kvpersist-shared", str(tmp_path / "shared"))
    shared = config.from_args(parsed(*store, "--kvpersist-shared-key", "./plain")).shared
    assert shared is not None and isinstance(shared[1], Cipher)


@pytest.mark.parametrize("name", ["encrypt", "shared-key", "warm", "dir"])
def test_tilde_in_a_path_option_is_the_home_folder(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A shell does not expand `~` in --option=~/file."""
    monkeypatch.setenv("HOME", str(tmp_path))
    (path,) = [
        value
        for value in vars(parsed(f"--kvpersist-{name}=~/file")).values()
        if str(tmp_path) in str(value)
    ]
    assert path in (tmp_path / "file", [tmp_path / "file"])
    with pytest.raises(SystemExit):
        parsed(f"--kvpersist-{name}=~nobody-here/file")
