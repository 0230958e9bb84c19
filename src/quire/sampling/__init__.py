"""From logits to tokens: the sampler, acceptance of drafts, loop detection.

Only `sampler` and the modules beside it that it uses import mlx; the HTTP side may import the rest.
"""
