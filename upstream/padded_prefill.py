"""A Nemotron-H prompt that is prefilled together with a longer one gets other log-probabilities."""

import mlx.core as mx
from mlx_lm.generate import BatchGenerator
from mlx_lm.models.nemotron_h import Model, ModelArgs

mx.random.seed(0)
sizes = dict(vocab_size=64, hidden_size=64, intermediate_size=64, max_position_embeddings=512)
sizes |= dict(num_attention_heads=2, num_key_value_heads=2, mamba_num_heads=4, mamba_head_dim=16)
sizes |= dict(ssm_state_size=32, conv_kernel=4, n_groups=1, num_hidden_layers=3)
flags = dict.fromkeys(["attention_bias", "mamba_proj_bias", "mlp_bias", "use_bias"], False)
flags |= dict(use_conv_bias=True, layer_norm_epsilon=1e-5, time_step_limit=(0.0, 10.0))
model = Model(ModelArgs("nemotron_h", hybrid_override_pattern=["M", "*", "M"], **sizes, **flags))
long, short = mx.random.randint(0, 64, (40,)).tolist(), mx.random.randint(0, 64, (9,)).tolist()


def first_logprobs(*prompts):
    """Return the log-probabilities of the last prompt's first token."""
    generator = BatchGenerator(model, max_tokens=1)
    last = generator.insert([list(prompt) for prompt in prompts])[-1]
    while True:
        for response in generator.next()[1]:
            if response.uid == last:
                return response.logprobs


alone, together = first_logprobs(short), first_logprobs(long, short)
print("largest difference of log-probabilities:", mx.abs(alone - together).max().item())
