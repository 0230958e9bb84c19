"""A whole step of generating rows as one operation: recorded kernels, launched together."""
