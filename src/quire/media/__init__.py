"""Fetching media safely. Decoding and hashing join it when models with eyes and ears are served."""
