"""Tests of Ollama's API."""
