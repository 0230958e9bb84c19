"""`/v1/load_lora_adapter` and `/v1/unload_lora_adapter`, as vLLM has them."""

from __future__ import annotations

from pathlib import Path
from typing import TypeVar

from pydantic import Field
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from quire.api.shared.access import note_ignored
from quire.api.shared.auth import EVERYONE, caller_of
from quire.api.shared.context import ServerContext
from quire.api.shared.json_text import parse_json
from quire.api.shared.limits import check_headers, read_body
from quire.api.shared.schema import Wire, parse
from quire.core.errors import Forbidden, NotOffered
from quire.serving.adapters import change_adapter
from quire.serving.model import Model

Fields = TypeVar("Fields", bound="UnloadAdapter")


class UnloadAdapter(Wire):
    """An adapter to forget."""

    lora_name: str = Field(min_length=1, max_length=256)
    model: str | None = Field(
        default=None, description="the model that the adapter is for; default: the first"
    )


class LoadAdapter(UnloadAdapter):
    """An adapter to load."""

    lora_path: str = Field(
        min_length=1, description="path relative to the folder of --adapter-folder"
    )


class Adapters:
    """The endpoints of LoRA adapters."""

    def __init__(self, server: ServerContext) -> None:
        self._server = server

    async def load(self, request: Request) -> Response:
        """Answer `POST /v1/load_lora_adapter`."""
        fields, model = await self._read(request, LoadAdapter)
        place = self._place(fields.lora_path)
        await change_adapter(self._server.models, model, name=fields.lora_name, place=place)
        return JSONResponse({"id": fields.lora_name, "object": "model", "parent": model.name})

    async def unload(self, request: Request) -> Response:
        """Answer `POST /v1/unload_lora_adapter`."""
        fields, model = await self._read(request, UnloadAdapter)
        await change_adapter(self._server.models, model, fields.lora_name, place=None)
        return JSONResponse({"id": fields.lora_name, "object": "model", "deleted": True})

    async def _read(self, request: Request, schema: type[Fields]) -> tuple[Fields, Model]:
        """Return the request's fields and its model.

        Raises:
            NotOffered: the operator has not allowed it.
            Forbidden: the server has several API keys.
        """
        server = self._server
        if server.config.adapter_folder is None:
            raise NotOffered(
                "Adapters are loaded and unloaded by request only if the server runs with "
                "--adapter-folder DIR.",
                code="not_offered",
            )
        if caller_of(request.scope) != EVERYONE:
            raise Forbidden(
                "This server has several API keys, so a key cannot change the adapters that "
                "all of them share.",
                code="not_allowed",
            )
        check_headers(request)
        with server.slots.bodies.reading() as counted:
            body = await read_body(request, server.config.max_body_bytes, counted)
        strict = server.config.strict_fields
        fields, unknown = parse(schema, parse_json(body), strict_fields=strict)
        note_ignored(request.scope, unknown)
        return fields, server.models.find(fields.model)

    def _place(self, path: str) -> str:
        """Return the folder of an adapter.

        Raises:
            Forbidden: it lies outside the folder that the operator allows.
        """
        allowed = Path(self._server.config.adapter_folder or "").resolve()
        try:
            folder = (allowed / path).resolve()
        except (OSError, ValueError):  # no path at all
            folder = allowed
        if folder == allowed or not folder.is_relative_to(allowed):
            raise Forbidden(
                "'lora_path' must be a folder below that of --adapter-folder.",
                param="lora_path",
                code="not_allowed",
            )
        return str(folder)
