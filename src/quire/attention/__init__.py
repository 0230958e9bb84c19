"""Attention over block tables: what a step's rows see, and the backends that compute it."""
