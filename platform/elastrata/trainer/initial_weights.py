"""The weights that a run begins with, from another run or a folder: found, checked and loaded."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from pydantic import ValidationError
from torch import Tensor, nn
from torch.optim import Optimizer

from elastrata.checkpoints.commit import MARKER, Commit, file_problems, list_commits
from elastrata.checkpoints.safetensors_files import DTYPES, SafetensorsFolder, StoredTensor
from elastrata.checkpoints.state import model_sizes, restore, restore_weights
from elastrata.checkpoints.weights_folder import (
    CONFIG,
    TOKENIZER,
    WeightsFolder,
    find_weights_folder,
    is_on_hub,
)
from elastrata.parallel.init_weights import id_tables, partial_tables, tensor_shapes
from elastrata.parallel.sharding import local, local_box
from elastrata.recipe.begin_with import BeginConfig, is_run
from elastrata.recipe.recipe import Recipe
from elastrata.run.consistency import choose_commit
from elastrata.run.folder import RUN_FILE, DataSet, Parent, read_identity, read_recipe
from elastrata.trainer.preflight import TrainingData
from elastrata.workload.hf_mapping import Counterpart, HasCounterpart, read_settings
from elastrata.workload.workload import Workload
from elastrata_pipelines.errors import UserError, pluralize, suggest_nearest
from elastrata_pipelines.format import Manifest, Vocabulary
from elastrata_pipelines.format.manifest import TOKENIZER_DIR
from elastrata_pipelines.preparation.tokenizer import TokenizerFiles
from elastrata_pipelines.storage import Storage

_KEY = "begin_with.weights"
_OWN = ("begin_with.", "workload.", "data.")
"""Prefixes of error lines that already name their own key."""


def find_parent(
    run: Storage, recipe: Recipe, data: TrainingData, warn: Callable[[str], None]
) -> Parent | None:
    """Find the parent of a run; return None if its weights are initialised at random.

    A run that has a checkpoint resumes from it, and its parent is no longer read. Until then the
    run must begin with the same weights as the first time.

    Raises:
        UserError: the run cannot begin so; one line for each reason.
    """
    begin = recipe.begin_with
    if begin is None:
        return None
    identity = read_identity(run)
    before = identity.parent if identity else None
    # From the first checkpoint on, the run's weights are its own.
    if before and list_commits(run.sub("checkpoints")):
        return before
    found = _find_weights(begin, recipe, data, warn, before.commit if before else None)
    if before and found.sha256 != before.sha256:
        raise UserError(
            f"{_KEY}: {begin.weights}: no longer the weights that the run began with: SHA-256 "
            f"{found.sha256[:12]}..., expected {before.sha256[:12]}..."
        )
    new = recipe.workload.num_ids(data.vocabulary) - found.num_ids
    if new > 0:
        warn(
            f"{_KEY}: {begin.weights}: embeddings of {pluralize(new, 'new token id')} are "
            "initialised at random"
        )
    elif more := found.num_ids - data.vocabulary.size:
        warn(f"{_KEY}: {begin.weights}: keeping {pluralize(more, 'embedding')} without a token id")
    return found


def keep_rows(recipe: Recipe, data: TrainingData, num_ids: int) -> Recipe:
    """Return the recipe with a model of at least `num_ids` ids, if its workload has such models.

    Published models often have more rows than their tokenizer has ids.
    """
    if num_ids <= recipe.workload.num_ids(data.vocabulary):
        return recipe
    return recipe.model_copy(
        update={"workload": recipe.workload.with_ids(num_ids) or recipe.workload}
    )


def _find_weights(
    begin: BeginConfig,
    recipe: Recipe,
    data: TrainingData,
    warn: Callable[[str], None],
    chosen: str | None,
) -> Parent:
    """Find the weights of `begin_with`; `chosen` is the checkpoint or revision that was used
    before."""
    try:
        if is_run(begin.place):
            return find_run_parent(begin, recipe, data, warn, chosen)
        folder = find_weights_folder(begin.place, chosen or begin.revision)
        return find_folder_parent(folder, begin, recipe, data, warn)
    except UserError as error:
        raise UserError(*_with_key(error.problems)) from None


def _with_key(lines: Iterable[str]) -> Iterator[str]:
    # Lines that name no key are about the weights.
    return (line if line.startswith(_OWN) else f"{_KEY}: {line}" for line in lines)


def place_problems(run: Storage, recipe: Recipe) -> list[str]:
    """Return the reasons why the weights of a new run cannot be found, whatever its data is."""
    begin = recipe.begin_with
    if begin is None or list_commits(run.sub("checkpoints")):
        return []
    try:
        if is_run(begin.place):
            choose_commit(Storage(begin.place), begin.revision or "newest", _KEY)
        # A model of the hub would be downloaded.
        elif not is_on_hub(begin.place):
            find_weights_folder(begin.place, begin.revision)
    except UserError as error:
        return list(_with_key(error.problems))
    return []


def find_run_parent(
    begin: BeginConfig,
    recipe: Recipe,
    data: TrainingData,
    warn: Callable[[str], None],
    folder: str | None = None,
) -> Parent:
    """Return the checkpoint of `begin_with` as a parent.

    Raises:
        UserError: the recipe cannot begin with it; one line for each reason.
    """
    run = Storage(begin.place)
    identity = read_identity(run)
    if identity is None:
        raise UserError(f"{begin.weights}: no run here ({RUN_FILE} is missing)")
    checkpoints, commit, lines = run.sub("checkpoints"), None, list[str]()
    # All mistakes are reported at once, so the recipe is compared with a checkpoint that is missing
    # or damaged, too, except for its tensors.
    try:
        commit = choose_commit(run, folder or begin.revision or "newest", _KEY)
        # All checksums, once: later starts only compare the marker.
        if damaged := file_problems(checkpoints, commit):
            lines.append(f"{_KEY}: checkpoint {checkpoints.uri(commit.folder)}: {damaged[0]}")
    except UserError as error:
        lines += error.problems
    before = read_recipe(run, identity)
    given = _given(run, before, None if lines else commit, identity.data[0], data, warn)
    recipe = keep_rows(recipe, data, given.num_ids)
    lines += fit_problems(given, begin, recipe, data)
    if begin.optimizer and given.sizes is not None:
        lines += _optimizer_problems(before, recipe, given, data)
    if lines or commit is None:
        raise UserError(*lines)
    return Parent(
        kind="run",
        url=run.uri(),
        # The marker has the checksums of all files, so its own identifies them.
        sha256=checkpoints.sha256(commit.folder, MARKER),
        num_ids=given.num_ids,
        commit=commit.folder,
        step=commit.step,
        samples=commit.samples,
        optimizer=begin.optimizer,
    )


def _given(
    run: Storage,
    before: Recipe,
    commit: Commit | None,
    data_set: DataSet,
    data: TrainingData,
    warn: Callable[[str], None],
) -> GivenWeights:
    """Return the tensors and token ids of a checkpoint, by its run's recipe and data set."""
    manifest, name = _find_manifest(data_set, data), run.uri()
    name = f"{name}, step {commit.step}" if commit else name
    if manifest is None and commit:
        warn(f"{data_set.url}: no longer the data set of {name}: its token ids are not checked")
    return GivenWeights(
        name=name,
        workload=before.workload.name,
        architecture=before.workload.architecture(),
        sizes=model_sizes(run.sub("checkpoints"), commit) if commit else None,
        num_ids=before.workload.num_ids((manifest or data.train.manifest).vocabulary),
        tokenizer=read_data_tokenizer(Storage(data_set.url), manifest) if manifest else None,
    )


def _find_manifest(data_set: DataSet, data: TrainingData) -> Manifest | None:
    """Return the manifest of a run's data set, or None if the data set is gone or has changed."""
    if data_set.fingerprint == data.train.manifest.fingerprint:
        return data.train.manifest
    try:
        found = Manifest.find(Storage(data_set.url))
    except UserError:
        return None
    return found if found and found.fingerprint == data_set.fingerprint else None


def _optimizer_problems(
    before: Recipe, recipe: Recipe, given: GivenWeights, data: TrainingData
) -> Iterator[str]:
    """Yield the reasons why the state of that run's optimizer cannot be reused."""
    theirs, ours = before.parts[-1].optimizer.name, recipe.parts[0].optimizer.name
    if ours != theirs:
        yield (
            f"begin_with.optimizer: true: the run was trained with {theirs}, this recipe has "
            f"{ours}: expected false, or optimizer.name {theirs}"
        )
    model = recipe.workload, data.vocabulary, data.seq_len
    if given.num_ids != recipe.workload.num_ids(data.vocabulary) or given.sizes != tensor_shapes(
        *model
    ):
        yield (
            "begin_with.optimizer: true: the embeddings have other sizes in "
            f"{given.name}: expected false"
        )


def find_folder_parent(
    folder: WeightsFolder,
    begin: BeginConfig,
    recipe: Recipe,
    data: TrainingData,
    warn: Callable[[str], None],
) -> Parent:
    """Return the folder of `begin_with` as a parent.

    Raises:
        UserError: the recipe cannot begin with it; one line for each reason.
    """
    name, tensors = begin.weights, folder.weights.tensors
    config = folder.config()
    recipe = keep_rows(recipe, data, int(config.vocab_size))
    architecture, table = _match_model(
        recipe.workload, config, data.vocabulary, folder.storage.uri(CONFIG)
    )
    ours = tensor_shapes(recipe.workload, data.vocabulary, data.seq_len)
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
        tokenizer=_read_tokenizer(folder, warn, name),
    )
    lines = [*fit_problems(given, begin, recipe, data), *_type_problems(counting, name)]
    if begin.optimizer:
        lines.append("begin_with.optimizer: true: expected false: a folder has only weights")
    # Values are checked last: they need the tensors' bytes, the other checks only headers.
    if lines := lines or [*_value_problems(folder.weights, names, table, ours, name)]:
        raise UserError(*lines)
    if left_out:
        warn(f"{_KEY}: {name}: left out because the model has no such part: {abbreviate(left_out)}")
    return _make_parent(folder, begin.place, given.num_ids)


def _make_parent(folder: WeightsFolder, place: str, num_ids: int) -> Parent:
    is_hubs = folder.hub_revision is not None
    return Parent(
        kind="hub" if is_hubs else "folder",
        url=place if is_hubs else folder.storage.uri(),
        sha256=folder.sha256(),
        num_ids=num_ids,
        commit=folder.hub_revision,
    )


def _match_model(
    workload: Workload, config: Any, vocabulary: Vocabulary, where: str
) -> tuple[dict[str, Any], Counterpart]:
    """Return the workload keys that a configuration fixes, and its mapping of tensors. The mapping
    is that of the recipe's model if both have the same architecture."""
    settings = None
    if isinstance(workload, HasCounterpart):
        settings = read_settings(type(workload), config, where)
    if settings is None or not isinstance(workload, HasCounterpart):
        raise UserError(
            f"{where}: a {config.model_type}: expected a model of workload {workload.name}"
        )
    try:
        theirs = type(workload).model_validate({**workload.model_dump(), **settings})
    except ValidationError as error:
        why = error.errors()[0]["msg"]
        raise UserError(f"{where}: not a model of workload {workload.name} ({why})") from None
    architecture = {k: v for k, v in theirs.architecture().items() if k in settings}
    # Otherwise tensors are compared with the folder's own model, for readable differences.
    is_same = architecture.items() <= workload.architecture().items()
    return architecture, (workload if is_same else theirs).counterpart(vocabulary)


def _read_tokenizer(
    folder: WeightsFolder, warn: Callable[[str], None], name: str
) -> GivenTokenizer | None:
    """Return the folder's tokenizer, or None if it has no fast one."""
    files = folder.tokenizer()
    if files is None:
        warn(f"{_KEY}: {name}: has no {TOKENIZER}: its token ids are not checked")
        return None
    return GivenTokenizer(fingerprint=files.fingerprint, ids=files.ids)


def _type_problems(counting: Mapping[str, StoredTensor], name: str) -> Iterator[str]:
    by_type: dict[str, list[str]] = {}
    for tensor, stored in counting.items():
        if stored.dtype not in DTYPES:
            by_type.setdefault(stored.dtype, []).append(tensor)
    for dtype, tensors in by_type.items():
        yield f"{_KEY}: {name}: {abbreviate(tensors)}: {dtype}, expected {' or '.join(DTYPES)}"


def _value_problems(
    weights: SafetensorsFolder,
    names: Mapping[str, str],
    table: Counterpart,
    ours: Mapping[str, object],
    name: str,
) -> Iterator[str]:
    """Yield a line for tied tensors that differ, and for non-zero biases that the model lacks."""
    # Some files hold both of two tied tensors; only one of them is loaded.
    for tied, other in table.tied.items():
        if tied in names and not torch.equal(
            _read_whole(weights, names[tied]), _read_whole(weights, names[other])
        ):
            yield f"{_KEY}: {name}: {tied} differs from {other}, but the model ties them"
    # Biases of zero are lost without a change of the outputs.
    lost = [
        bias
        for bias in sorted(table.zeros(ours))
        if bias in names and bool(_read_whole(weights, names[bias]).any())
    ]
    if lost:
        yield f"{_KEY}: {name}: {abbreviate(lost)}: not all zeros: expected workload.bias true"


def _read_whole(weights: SafetensorsFolder, name: str) -> Tensor:
    stored = weights.tensors[name]
    target = torch.empty(stored.shape)
    weights.copy(name, tuple(slice(0, length) for length in stored.shape), target)
    return target


_MAX_NAMES = 4
Shape = tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class GivenTokenizer:
    """The tokenizer that weights were trained with, as far as it is available."""

    fingerprint: str
    ids: Mapping[str, int] | None
    """Id of each token; None if its files are missing."""


@dataclass(frozen=True, kw_only=True)
class GivenWeights:
    """Weights of a checkpoint or folder, with the metadata that they are checked by."""

    name: str
    """Place of the weights, for messages."""
    workload: str
    architecture: Mapping[str, Any]
    """Keys as in `Workload.architecture`."""
    sizes: Mapping[str, Shape] | None
    """Shapes, by the names of `counterpart`; None if they cannot be read."""
    counterpart: Counterpart = field(default_factory=Counterpart)
    """Mapping of the model's parameters to the stored ones; by default they have the same names."""
    num_ids: int
    tokenizer: GivenTokenizer | None
    """None if it is unknown."""


def read_data_tokenizer(data: Storage, manifest: Manifest) -> GivenTokenizer:
    """Return the tokenizer that a data set was prepared with."""
    path = f"{TOKENIZER_DIR}/tokenizer.json"
    has_files = any(entry.path == path for entry in manifest.files)
    files = TokenizerFiles(data.read(path).decode(), "{}") if has_files else None
    return GivenTokenizer(
        fingerprint=manifest.tokenizer_fingerprint, ids=files.ids if files else None
    )


def fit_problems(
    given: GivenWeights, begin: BeginConfig, recipe: Recipe, data: TrainingData
) -> list[str]:
    """Return a line for each reason why a recipe cannot begin with these weights."""
    workload = recipe.workload
    if workload.name != given.workload:
        return [f"workload.name: {workload.name}: expected {given.workload}, as {given.name} has"]
    ours = workload.architecture()
    lines = [
        f"workload.{key}: {ours.get(key)}: expected {value}, as {given.name} has"
        for key, value in given.architecture.items()
        if ours.get(key) != value and key not in begin.may_differ
    ]
    lines += [
        f"begin_with.may_differ: {key}: no such key{suggest_nearest(key, ours)}"
        for key in begin.may_differ
        if key not in ours
    ]
    # With another architecture, every tensor would differ; the keys are the better message.
    if not lines and given.sizes is not None:
        lines = [f"{_KEY}: {line}" for line in _tensor_problems(given, given.sizes, recipe, data)]
    return [*lines, *_vocabulary_problems(given, begin, workload, data)]


def _tensor_problems(
    given: GivenWeights, sizes: Mapping[str, Shape], recipe: Recipe, data: TrainingData
) -> Iterator[str]:
    """Yield a line for missing and unexpected tensors, and for shapes that differ."""
    model = recipe.workload, data.vocabulary, data.seq_len
    ours, table = tensor_shapes(*model), given.counterpart
    expected = {table.origin(name).name: table.origin(name).shape(s) for name, s in ours.items()}
    expected |= {name: sizes.get(name, ()) for name in table.zeros(ours)}
    tables = {table.origin(name).name for name in id_tables(*model)}
    missing, extra = expected.keys() - sizes.keys(), sizes.keys() - expected.keys()
    if missing:
        hints = suggest_nearest(min(missing), extra)
        yield f"{given.name}: lacks {abbreviate(missing)}{hints}"
    if extra:
        yield f"{given.name}: has {abbreviate(extra)}, which the model lacks"
    for name in sorted(expected.keys() & sizes.keys()):
        # The number of rows of a table of ids may differ: the vocabulary may be extended.
        first = 1 if name in tables else 0
        if expected[name][first:] != sizes[name][first:]:
            yield f"{given.name}: {name} has shape {sizes[name]}, expected {expected[name]}"
        elif first and sizes[name][0] < given.num_ids:
            yield (
                f"{given.name}: {name} has {sizes[name][0]:,} rows, expected one for each of "
                f"{given.num_ids:,} ids"
            )


def abbreviate(names: Collection[str]) -> str:
    """Return the first of some tensors' names, sorted, and the number of the others."""
    more = len(names) - _MAX_NAMES
    also = f" and {more:,} more" if more > 0 else ""
    return ", ".join(sorted(names)[:_MAX_NAMES]) + also


def _vocabulary_problems(
    given: GivenWeights, begin: BeginConfig, workload: Workload, data: TrainingData
) -> Iterator[str]:
    num_ids, url = workload.num_ids(data.vocabulary), data.train.url
    holder = f"the tokenizer of {url}" if num_ids == data.vocabulary.size else "the model"
    if wrong := _describe_changed_ids(given.tokenizer, Storage(url), data.train.manifest):
        yield f"data.path: {url}: its token ids differ from those of {given.name}: {wrong}"
    elif num_ids < given.num_ids:
        yield (
            f"data.path: {url}: its tokenizer has {num_ids:,} ids, {given.name} {given.num_ids:,}: "
            "expected at least as many"
        )
    elif num_ids > given.num_ids and not begin.extend_vocabulary:
        yield (
            f"begin_with.extend_vocabulary: false: {holder} has {num_ids:,} ids, "
            f"{given.name} {given.num_ids:,}: expected true, which initialises new ones at random"
        )


def _describe_changed_ids(theirs: GivenTokenizer | None, data: Storage, manifest: Manifest) -> str:
    """Describe the first token whose id differs. Returns an empty string if all ids agree or cannot
    be compared."""
    if theirs is None or theirs.fingerprint == manifest.tokenizer_fingerprint:
        return ""
    ours = read_data_tokenizer(data, manifest).ids
    # Without both tokenizers' files, different fingerprints count as different ids.
    if theirs.ids is None or ours is None:
        return f"its fingerprint is {manifest.tokenizer_fingerprint}, not {theirs.fingerprint}"
    moved = sorted(
        (number, token) for token, number in theirs.ids.items() if ours.get(token) != number
    )
    if not moved:
        return ""
    (number, token), more = moved[0], len(moved) - 1
    also = f" (and {more:,} more)" if more else ""
    return f"{token!r} is {ours.get(token)}, expected {number}{also}"


def load_parent(
    parent: Parent,
    workload: Workload,
    vocabulary: Vocabulary,
    seq_len: int,
    model: nn.Module,
    optimizer: Optimizer,
) -> None:
    """Load the parent's weights into the model. Collective over all ranks.

    Raises:
        UserError: the parent is missing or altered, or has values that are NaN or infinite.
    """
    if parent.kind != "run":
        _read_folder(parent, workload, vocabulary, seq_len, model)
        return
    checkpoints = Storage(parent.url).sub("checkpoints")
    commit = _read_commit(checkpoints, parent)
    if parent.optimizer:
        restore(checkpoints, commit, model, optimizer)
    else:
        given = model_sizes(checkpoints, commit)
        rows = partial_tables(workload, vocabulary, seq_len, given, parent.num_ids)
        restore_weights(checkpoints, commit, model, rows)
    # Checked here, because the first step would otherwise report them as its own.
    _check_finite(model, checkpoints.uri(commit.folder))


@torch.no_grad()
def _read_folder(
    parent: Parent, workload: Workload, vocabulary: Vocabulary, seq_len: int, model: nn.Module
) -> None:
    """Load this rank's shards from a folder, block by block."""
    assert isinstance(workload, HasCounterpart)
    weights = find_weights_folder(parent.url, parent.commit).weights
    table = workload.counterpart(vocabulary)
    ours = tensor_shapes(workload, vocabulary, seq_len)
    files = table.known_names(weights.tensors, ours)
    tables = id_tables(workload, vocabulary, seq_len)
    for name, parameter in model.named_parameters():
        origin, shard, (rows, *others) = table.origin(name), local(parameter), local_box(parameter)
        if name in tables:  # the rows of later ids stay as they were drawn
            rows = slice(min(rows.start, parent.num_ids), min(rows.stop, parent.num_ids))
            shard = shard[: rows.stop - rows.start]
        place = origin.box((rows, *others), parameter.shape[0])
        weights.copy(files[origin.name], place, shard.T if origin.transposed else shard)


@torch.no_grad()
def _check_finite(model: nn.Module, where: str) -> None:
    """Check that this rank's shards of all weights are finite."""
    for name, parameter in model.named_parameters():
        shard = local(parameter)
        if shard.numel() and not all(end.isfinite() for end in torch.aminmax(shard)):
            raise UserError(f"{where}: {name}: contains NaN or infinity: expected finite numbers")


def _read_commit(checkpoints: Storage, parent: Parent) -> Commit:
    assert parent.commit is not None
    where = f"checkpoint {checkpoints.uri(parent.commit)}"
    try:
        if checkpoints.sha256(parent.commit, MARKER) != parent.sha256:
            raise UserError(f"{where}: altered since the run began with it")
        return Commit.from_json(checkpoints.read(parent.commit, MARKER), parent.commit)
    except FileNotFoundError:
        raise UserError(f"{where}: missing, but the run needs it to begin") from None
