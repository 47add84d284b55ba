"""`mlx-lm-kvpersist demo`: kill the server in the middle of a conversation, and continue."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from .output import console, ongoing, shown
from .servers import OWN_TEXT, Message, StartedServer, document, temporary_folder

_MAX_TOKENS = 32
_QUESTIONS = ("Who was the keeper of the lock?", "What was Ruth Amsel sent to find out?")
_END = "<|im_end|>"
_TEMPLATE = (
    "{%- for message in messages %}"
    '{{ "<|im_start|>" + message.role + "\\n" + message.content + "<|im_end|>\\n" }}'
    "{%- endfor %}"
    '{%- if add_generation_prompt %}{{ "<|im_start|>assistant\\n" }}{%- endif %}'
)


def run(args: argparse.Namespace) -> int:
    """Return 0 if the conversation was restored from disk, otherwise 1. Raises KVPersistError."""
    made = "make a tiny model with random weights" if args.model is None else f"take {args.model}"
    first, second = _QUESTIONS
    text = f"{document(args.chars)}\n\n{first}"
    messages: list[Message] = [{"role": "user", "content": text}]
    with temporary_folder("kvpersist-demo-") as folder, ongoing(made) as say:
        model = str(make_model(folder / "model")) if args.model is None else args.model
        plugin = ["--plugin", "kvpersist", "--kvpersist-dir", str(folder / "store")]
        say("1 of 5: mlx_lm.server starts with the plugin")
        with StartedServer(model, *plugin, log_path=folder / "plugin.log") as server:
            say("2 of 5: it reads a long text")
            cold = server.chat(messages, "demo", _MAX_TOKENS)
            server.wait_until_written()
            say("3 of 5: kill -9, and a new start")
            server.kill9()
            server.start()
            messages.append({"role": "assistant", "content": cold.text})
            messages.append({"role": "user", "content": second})
            warm = server.chat(messages, "demo", _MAX_TOKENS)
        say("4 of 5: mlx_lm.server starts without the plugin")
        with StartedServer(model, log_path=folder / "stock.log") as server:
            say("5 of 5: it reads the same conversation")
            stock = server.chat(messages, "demo", _MAX_TOKENS)
    print_line = console().print
    if args.model is not None:
        for question, reply in ((first, cold), (second, warm)):
            print_line(f"{question}\n> {shown(reply.text, 200)}")
    n_restored = int(warm.said("restored") or 0)
    if not n_restored:
        print_line("The conversation did not come back from disk.")
        return 1
    print_line(
        f"After kill -9 and a new start the next reply began after {warm.ttft_s:.2f} s, without "
        f"the plugin after {stock.ttft_s:.2f} s: {n_restored:,} of {warm.prompt_tokens:,} prompt "
        "tokens came from disk."
    )
    return 0


def make_model(folder: Path) -> Path:
    """Write a small Llama; return `folder`. Its greedy replies are endless printable text."""
    # Not at the top: importing mlx-lm takes seconds, during which nothing would be printed.
    import mlx.core as mx
    from mlx.utils import tree_flatten
    from mlx_lm.models import llama
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    folder.mkdir()
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=800,
        special_tokens=["<|im_start|>", _END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([OWN_TEXT.read_text(encoding="utf-8")], trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    about_tokenizer = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": _END}
    (folder / "tokenizer_config.json").write_text(json.dumps(about_tokenizer))
    (folder / "chat_template.jinja").write_text(_TEMPLATE)
    n_tokens = tokenizer.get_vocab_size()
    config = {
        "model_type": "llama",
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": n_tokens,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 131072,
        "tie_word_embeddings": False,
        "eos_token_id": tokenizer.token_to_id(_END),
    }
    (folder / "config.json").write_text(json.dumps(config))
    weights = dict(tree_flatten(llama.Model(llama.ModelArgs.from_dict(config)).parameters()))
    # Zero weights give a token the logit 0. The highest logit is above 0.
    printable = [tokenizer.decode([i]).isascii() and i > 1 for i in range(n_tokens)]
    weights["lm_head.weight"] *= mx.array(printable)[:, None]
    mx.save_safetensors(str(folder / "model.safetensors"), weights, metadata={"format": "mlx"})
    return folder
