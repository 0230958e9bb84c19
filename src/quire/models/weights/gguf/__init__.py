"""GGUF files (https://github.com/ggml-org/ggml/blob/master/docs/gguf.md) as model folders.

One file holds what a folder does: `folder` writes its configuration, tokenizer and chat template
beside links to it, so that the rest of the program sees a folder; `weights` reads its tensors.
"""
