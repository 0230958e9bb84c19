"""Loading and unloading LoRA adapters while a model is served."""

from __future__ import annotations

from functools import partial

from quire.core.errors import RequestError
from quire.core.messages import ChangeAdapter
from quire.serving.model import Model
from quire.serving.models import Models


async def change_adapter(models: Models, model: Model, name: str, place: str | None) -> None:
    """Load a LoRA adapter into a served model, or unload it.

    A model that is unloaded and loaded again gets its adapters back.

    Args:
        place: the adapter's folder; None unloads it.

    Raises:
        RequestError: the name is taken, unknown or in use, or the adapter cannot be used.
        EngineFailure: the engine is gone.
    """
    if place is None and name not in model.config.serving.adapters:
        raise RequestError(f"There is no adapter '{name}'.", param="lora_name")
    if place is not None and any(name in each.config.names for each in models):
        raise RequestError(
            f"'{name}' is already the name of a model; choose another.", param="lora_name"
        )
    if model.loaded is not None:
        question = partial(ChangeAdapter, name=name, place=place)
        problem: str = await model.loaded.service.client.ask(question)
        if problem:
            raise RequestError(problem, param="lora_name", code="adapter_refused")
    model.config = model.config.with_adapter(name, place)
