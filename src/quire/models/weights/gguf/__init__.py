"""GGUF files (https://github.com/ggml-org/ggml/blob/master/docs/gguf.md) as model folders.

A GGUF file holds a whole model. `folder` writes its configuration, tokenizer and chat template into
a folder that links to the file, so that other code sees a model folder. `weights` reads its
tensors.
"""
