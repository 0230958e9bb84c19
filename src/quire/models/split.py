"""A model split over ranks: each has its share of the layers, and rows of the head."""

from __future__ import annotations

import mlx.core as mx

from quire.core.errors import ModelError
from quire.device.ranks import Part
from quire.models.base import LanguageModel, named_parameters
from quire.models.shares import Cut, Cuts, Split, Stage, Take, head_rows
from quire.models.stages import LayeredModel

_HEAD, _TABLE = "lm_head.", "model.embed_tokens."
Weights = dict[str, mx.array]


def split_model(
    model: LanguageModel, weights: Weights, part: Part, take: Take
) -> tuple[LanguageModel, Weights]:
    """Return a rank's part of a model and of its weights, which stay lazy.

    Args:
        take: returns ranges of an array, such as `joined_pieces`.

    Raises:
        ModelError: a layer cannot be split over this number of ranks.
    """
    own, cuts = model.share(Split(part, _largest_group(model, weights)))
    ready = {}
    for name, array in weights.items():
        cut = _cut_of(name, cuts)
        ready[name] = array if cut is None else cut.of(name, array, part, take=take)
    if not any(name.startswith(_HEAD) for name in weights):  # the head is the table
        tied = {name: each for name, each in weights.items() if name.startswith(_TABLE)}
        ready |= {name.replace(_TABLE, _HEAD): each for name, each in tied.items()}
    heads = {
        name: _rows(each, part, take) for name, each in ready.items() if name.startswith(_HEAD)
    }
    return own, ready | heads


def split_by_layers(
    model: LanguageModel, weights: Weights, stage: Stage
) -> tuple[LanguageModel, Weights, tuple[range, ...]]:
    """Return a rank's layers of a model, their weights, and each rank's layers in the model's
    layout. All that is no layer is on each rank.

    Raises:
        ModelError: the model cannot be split so.
    """
    if not isinstance(model, LayeredModel):
        raise ModelError("this family cannot be split by layers yet", setting="pipeline")
    own, kept = model.staged(stage)
    here, places = named_parameters(own), named_parameters(model)
    gone = {name.rpartition(".")[0] for name in places.keys() - here.keys()}
    left = {name: each for name, each in weights.items() if name.rpartition(".")[0] not in gone}
    return own, left, kept


def _cut_of(name: str, cuts: Cuts) -> Cut | None:
    return cuts.get(name) or cuts.get(name.rpartition(".")[0])


def _largest_group(model: LanguageModel, weights: Weights) -> int:
    """Return the most inputs that a group of packed weights has; 1 if none are packed."""
    places = named_parameters(model)
    groups = [1]
    for name, array in weights.items():
        place = places.get(name.removesuffix("scales") + "weight")
        if name.endswith(".scales") and place is not None:
            groups.append(place.shape[-1] // array.shape[-1])
    return max(groups)


def _rows(array: mx.array, part: Part, take: Take) -> mx.array:
    each = head_rows(array.shape[0], part)
    own = take(array, [(part.rank * each, min((part.rank + 1) * each, len(array)))], 0)
    missing = each - own.shape[0]
    return mx.pad(own, [(0, missing), *[(0, 0)] * (own.ndim - 1)]) if missing else own
