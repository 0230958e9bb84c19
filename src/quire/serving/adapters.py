"""Loading and unloading LoRA adapters while a model is served."""

from __future__ import annotations

from functools import partial

from quire.core.errors import RequestError
from quire.core.messages import ChangeAdapter
from quire.serving.model import Model
from quire.serving.models import Models


async def change_adapter(models: Models, model: Model, name: str, place: str | None) -> None:
    """Load a LoRA adapter into a served model, or unload it.

    A model that is not loaded is loaded for a new adapter, because only its engine can say whether
    the adapter fits. A model that is unloaded and loaded again gets its adapters back. An adapter
    that is unloaded has no new requests from now on; those in flight are waited for.

    Args:
        place: the adapter's folder; None unloads it.

    Raises:
        RequestError: the name is taken or unknown, or the adapter cannot be used.
        EngineFailure: the engine is gone, or the model cannot be loaded.
    """
    _check(models, model, name=name, place=place)
    if place is None and model.loaded is None and model.opening is None:
        model.config = model.config.with_adapter(name, place=None)
        return
    lease = await models.use(model)  # an engine that opens or ends would not hear of the change
    try:
        client = lease.loaded.service.client
        change = partial(ChangeAdapter, name=name, place=place)
        async with models.renaming:
            _check(models, model, name=name, place=place)
            if place is not None and (problem := await client.ask(change)):
                raise RequestError(problem, param="lora_name", code="adapter_refused")
            model.config = model.config.with_adapter(name, place)
        if place is None:  # outside the lock: the requests that use it may take long
            await client.ask(change)
    finally:
        lease.release()


def _check(models: Models, model: Model, name: str, place: str | None) -> None:
    """Raise `RequestError` if the name cannot be added, or is not there to be removed."""
    if place is None and name not in model.config.serving.adapters:
        raise RequestError(f"There is no adapter '{name}'.", param="lora_name")
    if place is not None and any(name in each.config.names for each in models):
        raise RequestError(
            f"'{name}' is already the name of a model; choose another.", param="lora_name"
        )
