"""Code that the protocols share."""
