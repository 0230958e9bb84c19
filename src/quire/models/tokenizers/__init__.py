"""Converts other tokenizer formats to `tokenizer.json`."""
