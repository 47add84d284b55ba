"""On Hopper a quantized product with one group in a row returns the earlier content of memory."""

import mlx.core as mx

x = mx.ones((4, 64), mx.bfloat16)
for n_rows in (254, 256):
    packed = mx.quantize(mx.ones((n_rows, 64), mx.bfloat16), group_size=64, bits=4)
    mx.eval(x, packed)
    before = mx.full((4, n_rows), 7.0, mx.bfloat16)
    mx.eval(before)
    del before  # its memory is used again
    out = mx.quantized_matmul(x, *packed, transpose=True, group_size=64, bits=4)
    print(n_rows, "rows:", out[0, 0].item(), "(expected 64.0)")
