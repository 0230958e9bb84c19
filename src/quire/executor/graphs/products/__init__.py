"""Records products with matrices, and mixtures of experts."""
