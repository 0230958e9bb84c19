"""Routes of the protocols that this server does not offer, and what to do instead."""

from __future__ import annotations

_SPEECH = "Models here answer in text; speech is understood by '/v1/audio/transcriptions'."
_PICTURES = "Models here answer in text; they see pictures that stand in messages."
_SERVED = "The server serves the models that it was started with: 'quire serve MODEL'."
_REASONS = {
    "/v1/moderations": "No model here judges content; ask a chat model with a schema.",
    "/v1/images": _PICTURES,
    "/v1/videos": _PICTURES,
    "/v1/audio/speech": _SPEECH,
    "/v1/realtime": _SPEECH,
    "/v1/assistants": "OpenAI retires assistants: use '/v1/responses' with a 'conversation'.",
    "/v1/threads": "OpenAI retires assistants: use '/v1/conversations'.",
    "/v1/fine_tuning": "Models are not trained here; LoRA adapters are served (--adapter).",
    "/v1/vector_stores": "Files are not searched here; '/v1/embeddings' makes vectors.",
    "/v1/uploads": "Send a file whole, to '/v1/files'.",
    "/v1/evals": "Evaluations run outside of the server, over '/v1/completions'.",
    "/v1/containers": "Code does not run here; tools that clients run are offered.",
    "/v1/skills": "Skills of hosted containers do not run here.",
    "/v1/organization": "API keys are the operator's (--api-key-file).",
    "/v1/complete": "Use '/v1/messages'.",
    "/api/create": _SERVED,
    "/api/copy": _SERVED,
    "/api/delete": _SERVED,
    "/api/push": _SERVED,
    "/api/blobs": _SERVED,
    "/lora-adapters": "Name an adapter as the request's 'model'; GET /v1/models lists them.",
}
"""Why a route, and all below it, is not offered, by its path."""


def refusal(path: str) -> str | None:
    """Return why a path is not offered; None if no protocol here has it."""
    parts = path.rstrip("/").split("/")
    for count in range(len(parts), 1, -1):
        route = "/".join(parts[:count])
        if (reason := _REASONS.get(route)) is not None:
            return f"'{route}' is not offered. {reason}"
    return None
