"""A folder that transformers could load as the parent of a run: held against recipe and data."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from pydantic import ValidationError
from torch import Tensor

from elastrata.checkpoints.safetensors_files import DTYPES, SafetensorsFolder, StoredTensor
from elastrata.checkpoints.weights_folder import CONFIG, TOKENIZER, WeightsFolder
from elastrata.core.counterpart import Counterpart, HasCounterpart
from elastrata.core.first_weights import sizes
from elastrata.core.workload import Workload
from elastrata.recipe.begin_with import BeginConfig
from elastrata.recipe.recipe import Recipe
from elastrata.run.folder import Parent
from elastrata.trainer.parent_fit import GivenTokenizer, GivenWeights, fit_problems, in_short
from elastrata.trainer.preflight import TrainingData
from elastrata_pipelines.errors import UserError
from elastrata_pipelines.format import Vocabulary

_KEY = "begin_with.weights"


def folder_parent(
    folder: WeightsFolder,
    begin: BeginConfig,
    recipe: Recipe,
    data: TrainingData,
    warn: Callable[[str], None],
) -> Parent:
    """The folder that `begin_with` means, as a parent.

    Raises:
        UserError: a line for each reason why the recipe cannot begin with it.
    """
    name, tensors = begin.weights, folder.weights.tensors
    config = folder.config()
    architecture, table = _model(
        recipe.workload, config, data.vocabulary, folder.storage.uri(CONFIG)
    )
    ours = sizes(recipe.workload, data.vocabulary, data.seq_len)
    names = table.known_names(tensors, ours)
    left_out = [known for known in names if table.is_left_out(known)]
    counting = {
        known: tensors[stored]
        for known, stored in names.items()
        if not (table.is_unused(known) or known in left_out)
    }
    given = GivenWeights(
        name=name,
        workload=recipe.workload.name,
        architecture=architecture,
        counterpart=table,
        sizes={n: t.shape for n, t in counting.items() if n not in table.tied},
        num_ids=int(config.vocab_size),
        tokenizer=_tokenizer(folder, warn, name),
    )
    lines = [*fit_problems(given, begin, recipe, data), *_type_problems(counting, name)]
    if begin.optimizer:
        lines.append("begin_with.optimizer: true: expected false: a folder has weights alone")
    if lines := lines or [*_value_problems(folder.weights, names, table, ours, name)]:
        raise UserError(*lines)
    if left_out:
        warn(f"{_KEY}: {name}: left out, as the model has no such part: {in_short(left_out)}")
    return _parent(folder, begin.place, given.num_ids)


def _parent(folder: WeightsFolder, place: str, num_ids: int) -> Parent:
    is_hubs = folder.hub_revision is not None
    return Parent(
        kind="hub" if is_hubs else "folder",
        url=place if is_hubs else folder.storage.uri(),
        sha256=folder.sha256(),
        num_ids=num_ids,
        commit=folder.hub_revision,
    )


def _model(
    workload: Workload, config: Any, vocabulary: Vocabulary, where: str
) -> tuple[dict[str, Any], Counterpart]:
    """The keys of the workload that a configuration fixes, and where the tensors lie that it has:
    those of the recipe's model, where that is the same."""
    settings = None
    try:
        if isinstance(workload, HasCounterpart):
            settings = workload.settings_of(config)
    except UserError as error:
        raise UserError(*(f"{where}: {line}" for line in error.problems)) from None
    if settings is None or not isinstance(workload, HasCounterpart):
        raise UserError(
            f"{where}: a {config.model_type}: workload {workload.name} is none of these"
        )
    try:
        theirs = type(workload).model_validate({**workload.model_dump(), **settings})
    except ValidationError as error:
        why = error.errors()[0]["msg"]
        raise UserError(f"{where}: no model of workload {workload.name} ({why})") from None
    architecture = {k: v for k, v in theirs.architecture().items() if k in settings}
    is_same = architecture.items() <= workload.architecture().items()
    return architecture, (workload if is_same else theirs).counterpart(vocabulary)


def _tokenizer(
    folder: WeightsFolder, warn: Callable[[str], None], name: str
) -> GivenTokenizer | None:
    """The folder's tokenizer; None where it has none that is fast."""
    files = folder.tokenizer()
    if files is None:
        warn(f"{_KEY}: {name}: no {TOKENIZER} in it: its ids are not checked")
        return None
    return GivenTokenizer(fingerprint=files.fingerprint, ids=files.ids)


def _type_problems(counting: Mapping[str, StoredTensor], name: str) -> Iterator[str]:
    by_type: dict[str, list[str]] = {}
    for tensor, stored in counting.items():
        if stored.dtype not in DTYPES:
            by_type.setdefault(stored.dtype, []).append(tensor)
    for dtype, tensors in by_type.items():
        yield f"{_KEY}: {name}: {in_short(tensors)}: {dtype}, expected {' or '.join(DTYPES)}"


def _value_problems(
    weights: SafetensorsFolder,
    names: Mapping[str, str],
    table: Counterpart,
    ours: Mapping[str, object],
    name: str,
) -> Iterator[str]:
    """Tied tensors that differ, and biases that a model without them would lose."""
    for tied, other in table.tied.items():
        if tied in names and not torch.equal(
            _whole(weights, names[tied]), _whole(weights, names[other])
        ):
            yield f"{_KEY}: {name}: {tied} differs from {other}, though the model ties them"
    lost = [
        bias
        for bias in sorted(table.zeros(ours))
        if bias in names and bool(_whole(weights, names[bias]).any())
    ]
    if lost:
        yield f"{_KEY}: {name}: {in_short(lost)}: not all zeros: expected workload.bias true"


def _whole(weights: SafetensorsFolder, name: str) -> Tensor:
    stored = weights.tensors[name]
    target = torch.empty(stored.shape)
    weights.copy(name, tuple(slice(0, length) for length in stored.shape), target)
    return target
