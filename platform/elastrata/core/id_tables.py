"""The tables of a model that have a row for every id of the vocabulary."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache

from torch import Tensor

from elastrata.core.first_weights import meta_model
from elastrata.core.workload import Workload
from elastrata_pipelines.format import Vocabulary

_MORE_IDS = 2**21
"""More than any multiple that tables are filled up to."""


def sizes(workload: Workload, vocabulary: Vocabulary, seq_len: int) -> dict[str, tuple[int, ...]]:
    """The shape of every tensor of a workload's model, by name."""
    model = meta_model(lambda: workload.build_model(vocabulary, seq_len))
    state: dict[str, Tensor] = model.state_dict()
    return {name: tuple(tensor.shape) for name, tensor in state.items()}


@cache
def id_tables(workload: Workload, vocabulary: Vocabulary, seq_len: int) -> frozenset[str]:
    """The names of the tensors whose first dim grows with the vocabulary, all else as it is."""
    larger = vocabulary.model_copy(update={"size": vocabulary.size + _MORE_IDS})
    before, after = (sizes(workload, v, seq_len) for v in (vocabulary, larger))
    return frozenset(name for name, shape in before.items() if after[name] != shape)


def counted_rows(
    workload: Workload,
    vocabulary: Vocabulary,
    seq_len: int,
    given: Mapping[str, tuple[int, ...]],
    num_ids: int,
) -> dict[str, int]:
    """The tables that take the rows of so many ids, and not all, from given ones.

    Args:
        workload: its model's tables are meant.
        vocabulary: of its data.
        seq_len: of its data.
        given: the shapes of other tensors, by the names of this model.
        num_ids: that the given ones know.
    """
    wanted = sizes(workload, vocabulary, seq_len)
    return {
        name: num_ids
        for name in id_tables(workload, vocabulary, seq_len)
        if num_ids < vocabulary.size or given[name] != wanted[name]
    }
