"""Conversion of other tokenizer formats to `tokenizer.json`."""
