"""OpenAI's `/v1/audio/transcriptions`."""
