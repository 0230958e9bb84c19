"""Vision encoders, for images and videos, and projectors into a decoder."""
