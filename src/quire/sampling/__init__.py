"""From logits to tokens: the sampler, acceptance of drafts, loop detection.

Only `sampler` and the modules that it uses import MLX; the HTTP side may import the rest.
"""
