"""Makes the model that the package carries: data, tokenizer, training, evaluation."""
