"""Attention over block tables: the keys that a step's rows see, and the backends that
compute it.
"""
