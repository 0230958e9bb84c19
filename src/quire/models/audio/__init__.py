"""Audio encoders."""
