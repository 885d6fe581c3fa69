"""The data of a run's phases, and checks of the data sets of a mixture."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

from elastrata.planner.choice import micro_batch_budgets
from elastrata.recipe.data_sets import requested_mixture
from elastrata.recipe.recipe import PhaseKeys, Recipe
from elastrata.step.evaluate import EVALUATION_SEED
from elastrata.trainer.evaluation import EvaluationSet
from elastrata.workload.workload import model_spec
from elastrata_pipelines.batches import Batches, Source
from elastrata_pipelines.deal import FIXED_TOKENS
from elastrata_pipelines.errors import UserError, pluralize
from elastrata_pipelines.format import HELD_OUT, Manifest, file_problems, read_held_out
from elastrata_pipelines.format.manifest import PREPARE_AGAIN_ADVICE
from elastrata_pipelines.mixture import (
    UNITS,
    Leg,
    MixedOrder,
    Mixture,
    divide_evenly,
    shares_to_units,
)
from elastrata_pipelines.order import Order
from elastrata_pipelines.phase import (
    Origin,
    Phase,
    PhaseSize,
    compute_positions_after,
    place_phases,
)
from elastrata_pipelines.storage import Storage


@dataclass(frozen=True, kw_only=True)
class _DataSet:
    storage: Storage
    manifest: Manifest
    name: str = ""
    """Name of the source in a mixture; empty without one."""


@dataclass(frozen=True, kw_only=True)
class PhaseData:
    """The data of a phase, ready to be read."""

    training: Batches
    held_out: Batches | None
    """Data held out of the training data, or the data set of `evaluation.path` in its place."""
    sets: Mapping[str, Batches]
    """Further held-out data sets, by name."""


def find_phase_data(
    recipe: Recipe, part: PhaseKeys, sets: Mapping[str, EvaluationSet]
) -> PhaseData:
    """Find and check the data of a phase and the data that it is evaluated on.

    Raises:
        UserError: one line for each problem.
    """
    problems: list[str] = []
    training, held_out = [], dict[str, _DataSet]()
    names = [source.name for source in part.data.sources] or [""]
    for name, place in zip(names, part.data.places.values(), strict=True):
        try:
            found, held_out_set = _check_data_set(recipe, part, name, place)
        except UserError as error:
            problems += error.problems
            continue
        training.append(found)
        if held_out_set:
            # By address, because all sources share the data set of `evaluation.path`.
            held_out[held_out_set.storage.uri()] = held_out_set
    if recipe.target and not held_out and not problems:
        problems.append(_missing_target_problem(recipe, training))
    # Sources are compared only if all could be read.
    if part.data.sources and len(training) == len(names):
        problems += mixture_problems(part, [found.manifest for found in training])
    for extra in sets.values():
        problems += _length_problems(part, extra.manifest, extra.storage.uri())
    if problems:
        # Sources with a common held-out data set report its problems twice; each line is shown
        # once.
        raise UserError(*dict.fromkeys(problems))
    evaluated = list(held_out.values())
    further = {
        name: _DataSet(storage=one.storage, manifest=one.manifest) for name, one in sets.items()
    }
    data_sets = (*training, *evaluated, *further.values())
    cuts = _budgets(part, [found.manifest for found in data_sets])
    return PhaseData(
        training=_training_batches(recipe, part, cuts, training),
        held_out=_evaluation_batches(recipe, cuts, evaluated) if evaluated else None,
        sets={name: _evaluation_batches(recipe, cuts, [one]) for name, one in further.items()},
    )


def _check_data_set(
    recipe: Recipe, part: PhaseKeys, name: str, place: str
) -> tuple[_DataSet, _DataSet | None]:
    """Read and check a data set; return it and its held-out data, if any."""
    storage = Storage(place)
    manifest = Manifest.read(storage)
    problems = [
        *_missing_files(storage, manifest),
        *recipe.workload.problems(manifest),
        *_size_problems(part, place, manifest),
        *_memory_problems(recipe, place, manifest),
    ]
    try:
        held_out = _find_held_out(recipe, storage, manifest)
    except UserError as error:
        raise UserError(*problems, *error.problems) from None
    if held_out:
        problems += _held_out_problems(part, place, manifest, *held_out)
        problems += _memory_problems(recipe, held_out[0].uri(), held_out[1])
    if recipe.is_automatic:
        problems += _plan_problems(recipe, manifest)
    if problems:
        raise UserError(*problems)
    # Reads the index of lengths, so only after the cheap checks.
    manifest.check_lengths(storage)
    found = _DataSet(storage=storage, manifest=manifest, name=name)
    if held_out is None:
        return found, None
    # The data set of `evaluation.path` belongs to no source, so it is not mixed.
    own_name = "" if recipe.evaluation.path else name
    return found, _DataSet(storage=held_out[0], manifest=held_out[1], name=own_name)


def _training_batches(
    recipe: Recipe, part: PhaseKeys, cuts: tuple[int, ...], found: Sequence[_DataSet]
) -> Batches:
    window = part.data.window_stripes
    orders = tuple(_order(one.manifest, recipe.seed, window) for one in found)
    if not part.data.sources:
        return _batches(recipe, cuts, found, orders[0])
    size = PhaseSize(
        steps=part.num_steps, batch_size=part.batch_size, warmup=part.batch_size_warmup
    )
    manifests = [one.manifest for one in found]
    mixture = requested_mixture(part.data, manifests, size.samples(size.steps))
    order = MixedOrder(mixture=mixture, orders=orders, firsts=(0,) * len(orders))
    return _batches(recipe, cuts, found, order)


def _evaluation_batches(
    recipe: Recipe, cuts: tuple[int, ...], found: Sequence[_DataSet]
) -> Batches:
    """Return evaluation batches whose order is the same for all runs: all stripes in one window,
    and a constant seed. Of several data sets, they take equally many samples as far as available.
    """
    orders = tuple(_order(one.manifest, EVALUATION_SEED, one.manifest.stripes) for one in found)
    if not found[0].name:
        return _batches(recipe, cuts, found, orders[0])
    counts = divide_evenly(recipe.evaluation.samples, [one.manifest.samples for one in found])
    mixture = Mixture((Leg(shares=shares_to_units(counts)),))
    order = MixedOrder(mixture=mixture, orders=orders, firsts=(0,) * len(orders))
    return _batches(recipe, cuts, found, order)


def _order(manifest: Manifest, seed: int, window_stripes: int) -> Order:
    return Order(
        num_samples=manifest.samples,
        stripe_size=manifest.stripe_size,
        window_stripes=window_stripes,
        seed=seed,
    )


def _batches(
    recipe: Recipe, cuts: tuple[int, ...], found: Sequence[_DataSet], order: Order | MixedOrder
) -> Batches:
    first = found[0]
    work = recipe.workload.work(first.manifest.vocabulary)
    sources = (
        tuple(Source(name=one.name, url=one.storage.uri(), manifest=one.manifest) for one in found)
        if isinstance(order, MixedOrder)
        else ()
    )
    return Batches(
        url=first.storage.uri(),
        manifest=first.manifest,
        order=order,
        # Fixed cost of a micro-batch in token equivalents, so that the deal weighs their number.
        work=replace(work, fixed=FIXED_TOKENS * work.linear),
        tokens_per_micro_batch=cuts[0],
        virtual_ranks=recipe.parallel.virtual_ranks,
        micro_batch_multiple=recipe.parallel.micro_batch_multiple,
        larger_budgets=cuts[1:],
        sources=sources,
    )


def _plan_problems(recipe: Recipe, manifest: Manifest) -> tuple[str, ...]:
    """Return the reasons why the planner cannot choose the keys that the recipe leaves open."""
    try:
        model_spec(recipe.workload, manifest.vocabulary, manifest.seq_len)
    except UserError as error:
        return error.problems
    return ()


def _budgets(part: PhaseKeys, manifests: Sequence[Manifest]) -> tuple[int, ...]:
    """Return the candidate sizes of micro-batches in tokens, ascending."""
    if part.micro_batch_tokens != "auto":
        return (part.micro_batch_tokens,)
    return micro_batch_budgets(max(map(longest_sample, manifests)), part.batch_size)


def _missing_files(storage: Storage, manifest: Manifest) -> list[str]:
    return [f"{problem}; {PREPARE_AGAIN_ADVICE}" for problem in file_problems(storage, manifest)]


def _size_problems(part: PhaseKeys, place: str, manifest: Manifest) -> list[str]:
    problems = []
    # Sources are checked by their share of the batch in `_small_source_problems`.
    if part.batch_size > manifest.samples and not part.data.sources:
        problems.append(
            f"batch_size: {part.batch_size}: larger than the data set "
            f"({pluralize(manifest.samples, 'sample')} in {place})"
        )
    longest, most = longest_sample(manifest), part.micro_batch_tokens
    if most != "auto" and longest > most:
        which = f"{place}" if part.data.sources else "the data set"
        problems.append(
            f"micro_batch_tokens: {most}: {which} has samples of {pluralize(longest, 'token')}; "
            "expected at "
            "least that"
        )
    return problems


def _memory_problems(recipe: Recipe, place: str, manifest: Manifest) -> list[str]:
    """Return a line for each kind of worker whose micro-batches are shorter than the longest
    sample."""
    longest = longest_sample(manifest)
    return [
        f"workers.micro_batch_tokens.{name}: {most}: {place} has samples of "
        f"{pluralize(longest, 'token')}; "
        "expected at least that"
        for name, most in recipe.workers.micro_batch_tokens.items()
        if most < longest
    ]


def longest_sample(manifest: Manifest) -> int:
    """Return the number of tokens of the longest sample."""
    return max(length for length, count in enumerate(manifest.length_histogram) if count)


def _find_held_out(
    recipe: Recipe, data: Storage, manifest: Manifest
) -> tuple[Storage, Manifest] | None:
    """Return the held-out data set: that of the recipe, or else the one inside the training
    data."""
    if recipe.evaluation.path:
        storage = Storage(recipe.evaluation.path)
        return storage, Manifest.read(storage)
    held_out = read_held_out(data, manifest)
    return (data.sub(HELD_OUT), held_out) if held_out else None


def _missing_target_problem(recipe: Recipe, found: Sequence[_DataSet]) -> str:
    assert recipe.target is not None
    return (
        f"target.metric: {recipe.target.metric}: needs held-out data, but there is none in "
        f"{found[0].storage.uri(HELD_OUT)}; prepare with data.prepare.held_out, or give "
        "evaluation.path"
    )


def _held_out_problems(
    part: PhaseKeys, place: str, manifest: Manifest, storage: Storage, held_out: Manifest
) -> list[str]:
    problems = _missing_files(storage, held_out)
    if held_out.tokenizer_fingerprint != manifest.tokenizer_fingerprint:
        problems.append(f"{storage.uri()}: prepared with another tokenizer than {place}")
    return [*problems, *_length_problems(part, held_out, "the held-out data")]


def _length_problems(part: PhaseKeys, held_out: Manifest, called: str) -> list[str]:
    most, longest = part.micro_batch_tokens, longest_sample(held_out)
    if most == "auto" or longest <= most:
        return []
    return [f"micro_batch_tokens: {most}: {called} has samples of {pluralize(longest, 'token')}"]


_ALIKE = {
    "tokenizer_fingerprint": "the tokenizer",
    "seq_len": "seq_len",
    "version": "format version",
    "pairs": "pairs",
    "token_dtype": "token_dtype",
}
"""Fields of a manifest in which all sources must agree, with their names in messages."""


def mixture_problems(part: PhaseKeys, manifests: Sequence[Manifest]) -> list[str]:
    """Return a line for each source that cannot be mixed with the others."""
    return [
        *_mismatch_problems(part, manifests),
        *_duplicate_problems(part, manifests),
        *_small_source_problems(part, manifests),
    ]


def _mismatch_problems(part: PhaseKeys, manifests: Sequence[Manifest]) -> Iterator[str]:
    places = list(part.data.places.items())
    for field, called in _ALIKE.items():
        values = [getattr(manifest, field) for manifest in manifests]
        # The most common value is taken as right, so that the message names the odd source out.
        usual = Counter(values).most_common(1)[0][0]
        example = places[values.index(usual)][1]
        for (key, place), value in zip(places, values, strict=True):
            if value != usual:
                yield (
                    f"data.{key}: {place}: {called} {value}, expected {usual}, as in {example}: "
                    "all sources must agree"
                )


def _duplicate_problems(part: PhaseKeys, manifests: Sequence[Manifest]) -> Iterator[str]:
    """Yield a line for each data set that is a copy of another one."""
    # Positions are recorded by data set, so those of two copies could not be distinguished.
    first_places = dict[str, str]()
    for (key, place), manifest in zip(part.data.places.items(), manifests, strict=True):
        first = first_places.setdefault(manifest.fingerprint, place)
        if first != place:
            yield f"data.{key}: {place}: the same data set as {first}: expected it once"


def _small_source_problems(part: PhaseKeys, manifests: Sequence[Manifest]) -> Iterator[str]:
    """Yield a line for each source of which a batch would need a sample twice."""
    mixture = requested_mixture(part.data, manifests, 1)
    for number, (manifest, source) in enumerate(zip(manifests, part.data.sources, strict=True)):
        # Shares may change over a phase, so the larger of the first and last one counts.
        share = max(mixture.legs[0].shares[number], mixture.last_shares[number]) / UNITS
        taken = math.ceil(share * part.batch_size)
        if taken > manifest.samples:
            yield (
                f"data.sources.{number}.weight: {source.weight:g}: a batch of {part.batch_size} "
                f"takes {pluralize(taken, 'sample')} of {source.name}, which has "
                f"{manifest.samples:,}; "
                "expected a smaller weight, or a smaller batch_size"
            )


def limit_problems(
    recipe: Recipe, phases: Sequence[Phase], origin: Origin[str] | None
) -> list[str]:
    """Return a line for each source that the run would read more often than `max_epochs`
    permits."""
    try:
        placed = place_phases(phases, origin)
    # place_phases() cannot place phases whose sources all run out.
    except ValueError:
        return [_exhaustion_problem(recipe, phases)]
    sizes = [phase.size for phase in placed]
    data = [[url for url, _ in phase.batches.data_sets] for phase in placed]
    lines = []
    for number, last in enumerate(accumulate(size.steps for size in sizes)):
        # Phases that end before the fork are not run again.
        if any(placed[number].limits) and last > (origin.step if origin else 0):
            taken = compute_positions_after(last, sizes, data, origin)
            prefix = f"phases.{number}." if recipe.phases else ""
            lines += [prefix + line for line in _limit_lines(recipe, number, placed[number], taken)]
    return lines


def _limit_lines(recipe: Recipe, number: int, phase: Phase, taken: dict[str, int]) -> Iterator[str]:
    data = recipe.parts[number].data
    for at, (source, found, limit) in enumerate(
        zip(data.sources, phase.batches.sources, phase.limits, strict=True)
    ):
        count = taken.get(found.url, 0)
        # With redistribution a source just ends, and the others take its share.
        if limit is None or count <= limit or phase.redistributes:
            continue
        # Rounded up to two decimals, so that the suggested value is sufficient.
        least = math.ceil(count / found.manifest.samples * 100) / 100
        yield (
            f"data.sources.{at}.max_epochs: {source.max_epochs:g}: {pluralize(count, 'sample')} of "
            f"{source.name} are taken by the end of the phase, out of {found.manifest.samples:,}: "
            f"expected at least {least:.2f}, fewer steps, a smaller weight, or "
            "data.when_exhausted redistribute"
        )


def _exhaustion_problem(recipe: Recipe, phases: Sequence[Phase]) -> str:
    """Return the line for the case that all sources are exhausted, so none can take their share."""
    samples = sum(phase.size.samples(phase.steps) for phase in phases)
    limits = {
        source.name: limit
        for phase in phases
        for source, limit in zip(phase.batches.sources, phase.limits, strict=False)
        if limit is not None
    }
    left = ", ".join(f"{limit:,} of {name}" for name, limit in limits.items())
    return (
        f"data.when_exhausted: redistribute: {pluralize(recipe.steps_in_all, 'step')} take "
        f"{samples:,} "
        f"samples in all, but max_epochs allows {left}: expected fewer steps, or a source without "
        "limit"
    )
