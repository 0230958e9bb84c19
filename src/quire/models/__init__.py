"""Models: families, layers, encoders, weights and tokenizer conversion. `registry` lists the
families.
"""
