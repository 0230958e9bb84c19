"""Ollama's API: `/api/chat`, `/api/generate`, and routes that list and describe models."""
