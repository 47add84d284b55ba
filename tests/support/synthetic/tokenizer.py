"""Small tokenizers, trained for real, in the two families whose texts are hardest to match.

`byte-level` is the GPT-2 and Llama-3 family: a token may be half a character. `sentencepiece`
is the Llama-2 family: the first word gets a space, which decoding removes. Characters outside the
alphabet become byte tokens.
"""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from .conversation import corpus_lines

TokenizerKind = Literal["byte-level", "sentencepiece", "sentencepiece-legacy"]

# Llama-3's pattern; Qwen's differs in the digits only.
_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|"
    r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_SPACE = "\u2581"
_SENTENCEPIECE_ALPHABET = 110  # the rarer characters become byte tokens, as in Llama-2

_TOOLS = (
    "{%- macro tool_list() %}# Tools\n<tools>\n"
    "{%- for tool in tools %}{{ tool | tojson }}\n{%- endfor %}</tools>"
    "{%- endmacro %}"
    "{%- macro calls(message) %}"
    "{%- for tool_call in message.tool_calls %}"
    "{%- if tool_call.function %}{%- set tool_call = tool_call.function %}{%- endif %}"
    '{{ "\\n<tool_call>\\n" }}{"name": "{{ tool_call.name }}", '
    '"arguments": {{ tool_call.arguments | tojson }}}{{ "\\n</tool_call>" }}'
    "{%- endfor %}"
    "{%- endmacro %}"
)
_CHATML_TEMPLATE = (
    _TOOLS + "{%- if bos_token %}{{ bos_token }}{%- endif %}"
    '{%- if tools %}{{ "<|im_start|>system\\n" + tool_list() + "<|im_end|>\\n" }}{%- endif %}'
    "{%- for message in messages %}"
    '{{ "<|im_start|>" + message.role + "\\n" }}'
    "{{ message.content or '' }}"
    "{%- if message.tool_calls %}{{ calls(message) }}{%- endif %}"
    '{{ "<|im_end|>\\n" }}'
    "{%- endfor %}"
    '{%- if add_generation_prompt %}{{ "<|im_start|>assistant\\n" }}{%- endif %}'
)
_LLAMA2_TEMPLATE = (
    _TOOLS + "{%- if bos_token %}{{ bos_token }}{%- endif %}"
    '{%- if tools %}{{ "[SYSTEM]" + tool_list() + "[/SYSTEM]" }}{%- endif %}'
    "{%- for message in messages %}"
    "{%- if message.role == 'assistant' %}"
    "{{ message.content or '' }}"
    "{%- if message.tool_calls %}{{ calls(message) }}{%- endif %}{{ eos_token }}"
    "{%- elif message.role == 'user' %}"
    '{{ "[INST]" }}{{ message.content or "" }}{{ "[/INST]" }}'
    "{%- else %}"
    '{{ "[" + message.role | upper + "]" }}{{ message.content or "" }}'
    '{{ "[/" + message.role | upper + "]" }}'
    "{%- endif %}"
    "{%- endfor %}"
)


@dataclass(frozen=True)
class TokenizerFiles:
    tokenizer: Tokenizer
    config: dict[str, Any]  # tokenizer_config.json
    chat_template: str
    bos_token_id: int | None
    eos_token_id: int
    special_ids: frozenset[int]

    @property
    def n_tokens(self) -> int:
        return int(self.tokenizer.get_vocab_size(with_added_tokens=True))

    def save(self, path: Path) -> None:
        self.tokenizer.save(str(path / "tokenizer.json"))
        text = json.dumps(self.config, indent=2, ensure_ascii=False)
        (path / "tokenizer_config.json").write_text(text, encoding="utf-8")
        (path / "chat_template.jinja").write_text(self.chat_template, encoding="utf-8")


def train_tokenizer(
    kind: TokenizerKind,
    vocab_size: int,
    *,
    bos: bool,
    chat_template: str | None = None,
    extra_special_tokens: tuple[str, ...] = (),
) -> TokenizerFiles:
    """Train a BPE tokenizer on the corpus.

    byte-level: decode(encode(text)) == text for every text.
    sentencepiece: the same, except that a text that begins with a space loses it. This is the
        current form of Llama-2's files (Metaspace).
    sentencepiece-legacy: the same for texts without special tokens. After a special token inside
        the text, decoding adds a space (Prepend, the form first published).

    `vocab_size` counts special tokens, too. The result may have fewer if the corpus has no pairs
    left to merge. With `bos`, `encode` puts a begin token first, and the chat template renders it.
    `chat_template` replaces the kind's own.
    """
    if kind not in get_args(TokenizerKind):
        raise ValueError(f"unknown tokenizer kind {kind!r}; known: {get_args(TokenizerKind)}")
    if kind == "byte-level":
        bos_token, eos_token, pad_token = "<|begin_of_text|>", "<|im_end|>", "<|endoftext|>"
        specials = (pad_token, "<|im_start|>", eos_token, *((bos_token,) if bos else ()))
        specials += extra_special_tokens
        tokenizer = _train_byte_level(vocab_size, specials)
    else:
        bos_token, eos_token, pad_token = "<s>", "</s>", "<unk>"
        specials = (pad_token, bos_token, eos_token, *extra_special_tokens)
        tokenizer = _train_sentencepiece(vocab_size, specials, legacy=kind.endswith("legacy"))
    if bos:
        begin = processors.TemplateProcessing(
            single=f"{bos_token} $A",
            pair=f"{bos_token} $A {bos_token}:1 $B:1",
            special_tokens=[(bos_token, _token_id(tokenizer, bos_token))],
        )
        byte_level = kind == "byte-level"
        tokenizer.post_processor = (
            processors.Sequence([processors.ByteLevel(trim_offsets=False), begin])
            if byte_level
            else begin
        )
    config: dict[str, Any] = {
        # The generic class reads tokenizer.json unchanged, whatever config.json calls the model.
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": bos_token if bos else None,
        "eos_token": eos_token,
        "pad_token": pad_token,
        "clean_up_tokenization_spaces": False,
        "model_max_length": int(1e30),  # the usual value for no limit
    }
    if kind != "byte-level":
        config["unk_token"] = "<unk>"
    default_template = _CHATML_TEMPLATE if kind == "byte-level" else _LLAMA2_TEMPLATE
    return TokenizerFiles(
        tokenizer=tokenizer,
        config=config,
        chat_template=default_template if chat_template is None else chat_template,
        bos_token_id=_token_id(tokenizer, bos_token) if bos else None,
        eos_token_id=_token_id(tokenizer, eos_token),
        special_ids=frozenset(_token_id(tokenizer, token) for token in specials),
    )


def _token_id(tokenizer: Tokenizer, token: str) -> int:
    token_id = tokenizer.token_to_id(token)
    if token_id is None:
        raise ValueError(f"the tokenizer lost its special token {token!r}")
    return int(token_id)


def _train_byte_level(vocab_size: int, specials: tuple[str, ...]) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_WORDS), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(specials),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([f"{line}\n" for line in corpus_lines()], trainer)
    return tokenizer


def _train_sentencepiece(vocab_size: int, specials: tuple[str, ...], legacy: bool) -> Tokenizer:
    byte_tokens = [f"<0x{byte:02X}>" for byte in range(256)]
    trained = Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.Metaspace()
    # The trainer's own choice among equally rare characters differs from process to process.
    counts = sorted(Counter("".join(corpus_lines())).items(), key=lambda item: (-item[1], item[0]))
    alphabet = [_SPACE, *(char for char, _ in counts[:_SENTENCEPIECE_ALPHABET] if char != " ")]
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - len(specials) - len(byte_tokens),
        initial_alphabet=alphabet,
        limit_alphabet=len(alphabet),
        show_progress=False,
    )
    trained.train_from_iterator(corpus_lines(), trainer)
    model = json.loads(trained.to_str())["model"]
    pieces = sorted(model["vocab"], key=model["vocab"].__getitem__)
    vocab = {token: n for n, token in enumerate([*specials, *byte_tokens, *pieces])}
    merges = [(left, right) for left, right in model["merges"]]
    # Words are split apart in training only: like Llama-2's, the tokenizer itself treats the
    # whole text as one word.
    tokenizer = Tokenizer(
        models.BPE(vocab, merges, unk_token=specials[0], fuse_unk=True, byte_fallback=True)
    )
    tokenizer.add_special_tokens(list(specials))
    content: dict[str, Any] = json.loads(tokenizer.to_str())
    if legacy:
        # Llama-2 as first converted: the space also goes in front of text after a special token.
        content["normalizer"] = {
            "type": "Sequence",
            "normalizers": [
                {"type": "Prepend", "prepend": _SPACE},
                {"type": "Replace", "pattern": {"String": " "}, "content": _SPACE},
            ],
        }
    else:
        content["pre_tokenizer"] = {
            "type": "Metaspace",
            "replacement": _SPACE,
            "prepend_scheme": "first",
            "split": False,
        }
    # mlx_lm.tokenizer_utils chooses its detokenizer by this exact value.
    content["decoder"] = {
        "type": "Sequence",
        "decoders": [
            {"type": "Replace", "pattern": {"String": _SPACE}, "content": " "},
            {"type": "ByteFallback"},
            {"type": "Fuse"},
            {"type": "Strip", "content": " ", "start": 1, "stop": 0},
        ],
    }
    return Tokenizer.from_str(json.dumps(content))


def token_bytes(tokenizer: Tokenizer, token_id: int) -> bytes:
    """Return the bytes that an ordinary (not special) token stands for."""
    token = str(tokenizer.id_to_token(token_id))
    if isinstance(tokenizer.decoder, decoders.ByteLevel):
        return bytes(_BYTE_OF_CHAR[char] for char in token)
    if token.startswith("<0x") and len(token) == 6:
        return bytes([int(token[3:5], 16)])
    return token.replace(_SPACE, " ").encode()


def _bytes_of_chars() -> dict[str, int]:
    """GPT-2's table: printable bytes stand for themselves, the others for U+0100 and up."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    table = {chr(byte): byte for byte in plain}
    others = [byte for byte in range(256) if byte not in plain]
    return table | {chr(0x100 + n): byte for n, byte in enumerate(others)}


_BYTE_OF_CHAR = _bytes_of_chars()
