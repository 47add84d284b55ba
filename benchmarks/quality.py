"""The cost of each KV precision for SmolLM2-135M, and for copies of it that quantizing harms more.

    python -m tests.support.openblas python -m benchmarks.quality FILE...  [--tokens 1050]

The copy `4-bit` has weights rounded to 4 bits. The other copies compute the same function, but two
channel pairs of each key head are larger by the given factors, as in some Qwen models. Each
question is asked alone, and after the first text. The column `k8v4, newest too` quantizes the
newest block, too. A cell has the mean divergence, its 99th percentile (both in nats), and the rise
of the perplexity.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten
from mlx_lm import load
from mlx_lm.models.cache import KVCache, make_prompt_cache

from mlx_lm_kvpersist.cache.geometry.precision import Quantization
from mlx_lm_kvpersist.cache.live import packed as pk
from mlx_lm_kvpersist.cache.measuring.divergence import Predictions, encode, part_means, placed
from mlx_lm_kvpersist.cli.quality_checks import (
    FIRST_TOKENS,
    predicted,
    prompt_of,
    replies_to,
    served,
    server_attention,
)
from mlx_lm_kvpersist.config import DEFAULT_BITS, KV_BITS
from tests.support.synthetic.outliers import add_outliers
from tests.support.synthetic.smollm2 import make_smollm2

from .models import DEFAULT_MODELS_DIR

VARIANTS: dict[str, dict[str, Any]] = {
    "float32": {},
    "4-bit": {},
    "8 to 16 times": {"factors": (8.0, 16.0)},
    "24 to 32 times": {"factors": (24.0, 32.0)},
    "64 to 128 times, first and last layer": {"factors": (64.0, 128.0), "layers": (0, -1)},
}
NEWEST_TOO = f"{DEFAULT_BITS}, newest too"
LAYOUTS = (*(name for name in KV_BITS if name != "16"), NEWEST_TOO)
QUESTIONS = Path(__file__).with_name("questions.txt")


class Rounded(KVCache):  # type: ignore[misc]
    """Rotates, then rounds keys to 8 bits and values to 4, also in the newest block."""

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> Any:
        both = ((keys, Quantization(8, 64, True)), (values, Quantization(4, 64, True)))
        read = (pk.read(pk.quantize(x, how), how, x.dtype) for x, how in both)
        return super().update_and_fetch(*read)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("texts", nargs="+", type=Path, metavar="FILE", help="UTF-8")
    parser.add_argument("--models-dir", type=Path, default=DEFAULT_MODELS_DIR)
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=list(VARIANTS))
    parser.add_argument("--layouts", nargs="+", choices=LAYOUTS, default=LAYOUTS)
    parser.add_argument("--tokens", type=int, default=1050, help="number of tokens of each text")
    parser.add_argument("--questions", type=int, default=50, help="number of questions; 0: none")
    args = parser.parse_args()
    with server_attention():
        for name in args.variants:
            model, tokenizer = loaded_variant(args.models_dir, name)
            for row in measured(model, tokenizer, args.layouts, args.texts, args.tokens):
                print(json.dumps({"model": name, **row}), flush=True)
            for text in (None, args.texts[0]) if args.questions else ():
                row = asked(model, tokenizer, text, args.tokens, args.questions)
                print(json.dumps({"model": name, **row}), flush=True)


def loaded_variant(models_dir: Path, name: str) -> tuple[Any, Any]:
    """Load the model and its tokenizer. A missing model is made."""
    plain = models_dir / "smollm2-float32"
    if not plain.is_dir():
        make_smollm2(plain)
    path = plain
    if VARIANTS[name]:
        path = models_dir / f"smollm2-{name.replace(' ', '-').replace(',', '')}"
        if not path.is_dir():
            add_outliers(plain, path, **VARIANTS[name])
    loaded: Any = load(str(path))
    if name == "4-bit":
        round_weights(loaded[0])
    return loaded[0], loaded[1]


def round_weights(model: Any) -> None:
    """Keep plain arrays after rounding to 4 bits: packed products are slow on a CPU."""
    rounded = []
    for name, weight in tree_flatten(model.parameters()):
        if weight.ndim == 2:
            packed = mx.quantize(weight, group_size=64, bits=4)
            weight = mx.dequantize(*packed, group_size=64, bits=4)
        rounded.append((name, weight))
    model.load_weights(rounded)


def measured(
    model: Any, tokenizer: Any, layouts: Sequence[str], texts: Sequence[Path], n_tokens: int
) -> Iterator[dict[str, Any]]:
    """Yield rows with a cell for each layout: the bits, then the losses on each text and on the
    worst short text."""
    specs = {
        name: served(model, KV_BITS[name], "dequantize") for name in layouts if name in KV_BITS
    }
    makers: dict[str, Any] = {name: spec.make_cache for name, spec in specs.items()}
    bits = {name: f"{spec.bits_per_number:.2f}" for name, spec in specs.items()}
    if NEWEST_TOO in layouts:
        makers[NEWEST_TOO] = lambda: [Rounded() for _ in model.layers]
        bits[NEWEST_TOO] = "6.50"
    yield {"text": "bits a number", **bits}
    for path in texts:
        begin, ids = encode(tokenizer, path.read_text(encoding="utf-8"))
        if len(ids) < n_tokens:
            raise SystemExit(f"{path} has only {len(ids):,} tokens")
        read = predicted(model, [*begin, *ids[:n_tokens]], makers)
        yield {"text": path.stem, **{name: _cell(its) for name, its in read.items()}}
    ids, places = placed(tokenizer)
    worst = {}
    for name, its in predicted(model, ids, makers).items():
        means = part_means(its.divergence, places)
        part = max(means, key=lambda each: means[each])
        worst[name] = f"{means[part]:.4f}, {part}"
    yield {"text": "the worst short text of the package", **worst}


def asked(
    model: Any, tokenizer: Any, text: Path | None, n_tokens: int, n_questions: int
) -> dict[str, Any]:
    """Return the number of replies that begin with the same tokens as in full precision."""
    before = ""
    if text is not None:
        ids = encode(tokenizer, text.read_text(encoding="utf-8"))[1][:n_tokens]
        before = f"{tokenizer.decode(ids)}\n\n"
    questions = QUESTIONS.read_text(encoding="utf-8").splitlines()[:n_questions]
    prompts = [prompt_of(tokenizer, f"{before}{question}") for question in questions]
    spec = served(model, KV_BITS[DEFAULT_BITS], "dequantize")
    own, ours = (
        replies_to(model, prompts, make, FIRST_TOKENS, set(tokenizer.eos_token_ids))
        for make in (partial(make_prompt_cache, model), spec.make_cache)
    )
    same = [mine == its for mine, its in zip(own, ours, strict=True)]
    where = "alone" if text is None else f"after {text.stem}"
    return {
        "text": f"first {FIRST_TOKENS} tokens of {len(same)} replies, {where}",
        DEFAULT_BITS: f"{sum(same)} same",
    }


def _cell(read: Predictions) -> str:
    mean, most = read.divergence_nats.value, read.divergence_p99_nats
    return f"{mean:.4f} / {most:.3f} / {read.perplexity_rise.value:+.2%}"


if __name__ == "__main__":
    main()
