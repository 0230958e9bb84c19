"""Encoders of images and videos, and the projectors into a decoder."""
