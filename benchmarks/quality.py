"""The cost of each KV precision for SmolLM2-135M, and for copies of it that bear less.

    python -m tests.support.openblas python -m benchmarks.quality [--tokens 4096] [--measure-s 600]

The texts are not what `auto` is chosen on. The copies compute the same function; two channel pairs
of each key head are larger by the given factors, as in some Qwen models. Figures are of one run; ±
is the standard error over tokens.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx_lm import load
from mlx_lm.models.cache import make_prompt_cache

from mlx_lm_kvpersist.cache.geometry.precision import Estimate, PrecisionChoice
from mlx_lm_kvpersist.cache.geometry.spec import ModelCacheSpec
from mlx_lm_kvpersist.cli.quality_checks import score_text, windows_of
from mlx_lm_kvpersist.config import DEFAULT_BITS, KV_BITS
from tests.support.synthetic.outliers import add_outliers
from tests.support.synthetic.smollm2 import make_smollm2

from .models import DEFAULT_MODELS_DIR
from .report import Result

ROOT = Path(__file__).parents[1]
TEXTS = ("mlx_lm_kvpersist/cli/quality_text.txt", "tests/support/synthetic/corpus.txt")
VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "4 to 8 times": {"factors": (4.0, 8.0)},
    "8 to 16 times": {"factors": (8.0, 16.0)},
    "32 to 64 times, first and last layer": {"factors": (32.0, 64.0), "layers": (0, -1)},
}
_ROTATED = (True, True)
FIXED = {
    "default": replace(KV_BITS[DEFAULT_BITS], rotated=_ROTATED),
    "4": PrecisionChoice(4, 4),
    "4, rotated": PrecisionChoice(4, 4, None, _ROTATED),
    "5, rotated": PrecisionChoice(5, 5, None, _ROTATED),
    "k6v4, rotated": PrecisionChoice(6, 4, None, _ROTATED),
    "k8v4, rotated": PrecisionChoice(8, 4, None, _ROTATED),
    "8": PrecisionChoice(8, 8),
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models-dir", type=Path, default=DEFAULT_MODELS_DIR)
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=list(VARIANTS))
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--out", type=Path, help="folder of the result")
    args = parser.parse_args()
    setting = {"texts": ", ".join(TEXTS), "tokens": args.tokens, "dtype": "float32"}
    about = "What the KV cache's precision costs SmolLM2-135M-Instruct."
    result = Result("quality-smollm2", about, setting, folder=args.out)
    plain = args.models_dir / "smollm2-float32"
    if not plain.is_dir():
        make_smollm2(plain)
    for name in args.variants:
        path = plain
        if VARIANTS[name]:
            path = args.models_dir / f"smollm2-{name.replace(' ', '-').replace(',', '')}"
            if not path.is_dir():
                add_outliers(plain, path, **VARIANTS[name])
        for row in measured(path, args.tokens):
            result.add({"model": name, **row})
            print(result.rows[-1], flush=True)
    result.write()
    result.show()


def measured(path: Path, n_tokens: int) -> Iterator[dict[str, Any]]:
    loaded: Any = load(str(path))
    model, tokenizer = loaded[0], loaded[1]
    text = "\n\n".join((ROOT / name).read_text(encoding="utf-8") for name in TEXTS)
    ids = tokenizer.encode(text, add_special_tokens=False)[:n_tokens]
    if len(ids) < n_tokens:
        raise SystemExit(f"the texts have only {len(ids):,} tokens")
    specs = {
        name: ModelCacheSpec.probe(model, choice, evaluate=False) for name, choice in FIXED.items()
    }
    makers = {name: spec.make_cache for name, spec in specs.items()}
    windows = windows_of(ids, [], n_tokens, n_tokens // 2)
    scores = score_text(model, windows, {"16": partial(make_prompt_cache, model), **makers}, _quiet)
    for name, its_spec in specs.items():
        score = scores[name]
        yield {
            "cache": name,
            "bits": round(its_spec.bits_per_number - _scales_over_16_bits(its_spec), 2),
            "perplexity": _shown(score.perplexity_rise, 100, "%"),
            "divergence": _shown(score.divergence_nats),
            "same next token": f"{score.agreement.value:.1%}",
        }


def _scales_over_16_bits(spec: ModelCacheSpec) -> float:
    """Return the bits that scales and biases take beyond those of a model in 16 bits."""
    (group, *_) = spec.full
    assert group.keys is not None and group.precision is not None
    return 2 * (8 * group.keys.mx_dtype.size - 16) / group.precision.group_size


def _shown(estimate: Estimate, factor: float = 1, unit: str = "") -> str:
    digits = 2 if unit else 4
    value = f"{factor * estimate.value:+.{digits}f}" if unit else f"{estimate.value:.{digits}f}"
    return f"{value}{unit} ± {factor * estimate.error:.{digits}f}{unit}"


def _quiet() -> None:
    mx.clear_cache()


if __name__ == "__main__":
    main()
