"""With a draft model, the cache of a reply can have one token less than the reply."""

from itertools import islice

import mlx.core as mx
from mlx_lm.generate import generate_step, speculative_generate_step
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.models.llama import Model, ModelArgs


def tiny(seed):
    mx.random.seed(seed)
    sizes = dict(hidden_size=64, num_hidden_layers=2, intermediate_size=64, vocab_size=64)
    return Model(ModelArgs("llama", num_attention_heads=2, rms_norm_eps=1e-5, **sizes))


model, draft, prompt = tiny(0), tiny(1), [1, 2, 3, 4, 5]
for n_tokens in range(1, 9):
    cache = make_prompt_cache(model)
    steps = generate_step(mx.array(prompt), model, prompt_cache=cache)
    reply = [token for token, *_ in islice(steps, n_tokens)]
    stock = cache[0].offset - len(prompt) - len(reply)
    cache = make_prompt_cache(model) + make_prompt_cache(draft)
    steps = speculative_generate_step(mx.array(prompt), model, draft, prompt_cache=cache)
    reply = [token for token, *_ in islice(steps, n_tokens)]
    steps.close()  # as the server does at the end of a reply
    drafted = cache[0].offset - len(prompt) - len(reply)
    print(f"{n_tokens} tokens: without a draft {stock:+d}, with a draft {drafted:+d}")
