"""The spec of a recipe's data set: what a model must know of it, also before it is prepared."""

from __future__ import annotations

from dataclasses import dataclass

from elastrata.recipe.recipe import Recipe
from elastrata_pipelines.errors import UserError
from elastrata_pipelines.format import Manifest, Vocabulary
from elastrata_pipelines.storage import Storage


@dataclass(frozen=True, kw_only=True)
class DataSpec:
    """What samples look like."""

    vocabulary: Vocabulary
    seq_len: int
    """No sample is longer."""
    pairs: bool
    """Whether samples are sentence pairs."""
    prepared: bool
    """Whether the data set is there; else this is what `elastrata prepare` is asked for."""


def data_spec(recipe: Recipe) -> DataSpec:
    """That of the (first phase's) data set where it is there, else of the one that is asked for.

    Raises:
        UserError: the size of the vocabulary is not known before the data is prepared.
    """
    data = recipe.parts[0].data
    storage = Storage(data.path)
    if manifest := Manifest.find(storage):
        return DataSpec(
            vocabulary=manifest.vocabulary,
            seq_len=manifest.seq_len,
            pairs=manifest.pairs,
            prepared=True,
        )
    prepare = data.prepare
    if prepare is None or prepare.tokenizer.train is None:
        raise UserError(
            f"data.path: {data.path}: no data set here, whose tokenizer gives the model its "
            "size; make it with `elastrata prepare`"
        )
    size = prepare.tokenizer.vocab_size
    return DataSpec(
        vocabulary=Vocabulary(size=size, pad_id=0, mask_id=1, special_ids=(), continuation_ids=()),
        seq_len=prepare.seq_len,
        pairs=prepare.pairs,
        prepared=False,
    )
