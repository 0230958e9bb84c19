"""Quire: an inference server that answers many requests at once, each as if it were alone."""

__version__ = "0.1.0"
