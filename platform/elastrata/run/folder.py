"""The folder of a run: what it is called, what it trains on what, and what it began with."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from tempfile import NamedTemporaryFile
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field, NonNegativeInt
from typing_extensions import override

from elastrata.recipe.yaml_values import dump_yaml, read_stored
from elastrata.step.target import TargetConfig
from elastrata_pipelines.checked_json import Record, read_bytes, read_record
from elastrata_pipelines.errors import UserError
from elastrata_pipelines.groups import BatchSizeWarmup
from elastrata_pipelines.mixture import UNITS, Leg, Mixture
from elastrata_pipelines.phase import Key, Origin, PhaseSize
from elastrata_pipelines.storage import Storage

if TYPE_CHECKING:
    from elastrata.recipe.recipe import Recipe


class ForkOrigin(Record):
    """The place in another run, its parent, that a run goes on from."""

    url: Annotated[str, Field(min_length=1, max_length=10_000)]
    """The parent's folder; absolute."""
    commit: Annotated[str, Field(pattern=r"^[0-9]{9}-[0-9]{4,9}-[0-9a-f]{6}$")]
    """The name of the checkpoint there."""
    sha256: Annotated[str, Field(pattern="^[0-9a-f]{64}$")]
    """Of the checkpoint's marker, which holds the checksums of its files."""
    step: NonNegativeInt
    """Steps done in it."""
    samples: NonNegativeInt
    """Samples seen."""
    tokens: NonNegativeInt
    """Tokens seen."""
    positions: dict[str, NonNegativeInt]
    """Samples taken by then of each data set that the fork reads on in the same order, by the data
    set's fingerprint; of others it begins with the first."""

    @override
    def __str__(self) -> str:
        return f"{self.url}, step {self.step} (SHA-256 {self.sha256[:12]})"

    def placed(self, data: Mapping[Key, str]) -> Origin[Key]:
        """The place that phases are reckoned from.

        Args:
            data: the fingerprint of each data set, by what it is called.
        """
        known = {key: self.positions.get(value, 0) for key, value in data.items()}
        return Origin(step=self.step, samples=self.samples, positions=known)

    def to_tags(self) -> dict[str, str]:
        """The tags of a run's record."""
        return {"parent": self.url, "parent.step": str(self.step), "parent.sha256": self.sha256}


class Parent(Record):
    """The weights that a run began with, as `run.json` names them."""

    kind: Literal["run", "folder", "hub"]
    """A checkpoint of another run, a folder that transformers could load, or a model of the hub."""
    url: Annotated[str, Field(min_length=1, max_length=10_000)]
    """The run's folder, or that of the weights; absolute. hub: the model's name."""
    sha256: Annotated[str, Field(pattern="^[0-9a-f]{64}$")]
    """run: of the checkpoint's marker, which holds the checksums of its files. Else: of the lines
    that `sha256sum` prints for config.json and the safetensors files, sorted by name."""
    num_ids: NonNegativeInt
    """Ids that it knows; rows of later ones are drawn."""
    commit: str | None = None
    """run: the name of the checkpoint. hub: the revision."""
    step: NonNegativeInt | None = None
    """run: its optimizer steps..."""
    samples: NonNegativeInt | None = None
    """... and samples."""
    optimizer: bool = False
    """Whether the optimizer's state comes from there, too."""

    @override
    def __str__(self) -> str:
        step = "" if self.step is None else f", step {self.step}"
        return f"{self.url}{step} (SHA-256 {self.sha256[:12]})"

    def to_tags(self) -> dict[str, str]:
        """The tags of a run's record."""
        tags = {"parent": self.url, "parent.sha256": self.sha256}
        return tags if self.step is None else {**tags, "parent.step": str(self.step)}


Share = Annotated[int, Field(ge=0, le=UNITS)]
Positions = Annotated[int, Field(ge=0, lt=2**62)]


class LegRecord(Record):
    """As `Leg` has it."""

    shares: Annotated[tuple[Share, ...], Field(min_length=1)]
    final_shares: tuple[Share, ...] | None = None
    length: Annotated[int, Field(ge=1, lt=2**62)]
    stop: Positions | None = None


Mixtures = tuple[tuple[LegRecord, ...], ...]
"""The legs of each phase's mixture; none of a phase that has one data set."""


def record_of(mixtures: Sequence[Mixture | None]) -> Mixtures | None:
    """The record of the phases' mixtures; None where there is none."""
    if not any(mixtures):
        return None
    return tuple(
        tuple(LegRecord.model_validate(vars(leg)) for leg in mixture.legs) if mixture else ()
        for mixture in mixtures
    )


def mixtures_of(record: Mixtures | None, num_phases: int) -> tuple[Mixture | None, ...]:
    """The mixture of each phase.

    Raises:
        ValueError: there are not so many phases, or shares that do not add up.
    """
    if record is None:
        return (None,) * num_phases
    if len(record) != num_phases:
        raise ValueError(f"{len(record)} mixtures, expected {num_phases}")
    return tuple(
        Mixture(tuple(Leg(**leg.model_dump()) for leg in legs)) if legs else None for legs in record
    )


RUN_FILE, RECIPE_FILE = "run.json", "recipe.yaml"
Text = Annotated[str, Field(min_length=1, max_length=10_000)]
MAY_CHANGE = (
    "name",
    "storage",
    "workers",
    "checkpoint",
    "tracking",
    "evaluation",
    "average",
    "target",
    "parallel",
    "micro_batch_tokens",
    "activation_checkpointing",
    "compile",
    "workload.attention",
    "data.path",
    "data.prepare",
)
"""Keys of a recipe that a run may be continued with another value of: they change where and how
the same samples are computed on, not what is learned from them."""


class DataSet(Record):
    """A data set that a run trains on."""

    url: Text
    """Absolute path or URL, as the newest launch found it."""
    fingerprint: Text
    """The fingerprint in its manifest."""


class RunIdentity(Record):
    """The identity of a run, by which it is the same after a restart."""

    name: Text
    data: tuple[DataSet, ...]
    """That of every phase; of one with sources, theirs in order."""
    mlflow_run_id: Annotated[str, Field(max_length=10_000)] | None = None
    parent: Parent | None = None
    """The weights that it began with; None: drawn ones."""
    origin: ForkOrigin | None = None
    """The place in another run that it goes on from; None: it is no fork."""
    mixtures: Mixtures | None = None
    """How every phase mixes its sources; None: no phase has any."""
    recipe_sha256: str | None = None
    """The checksum of the recipe's file; None: written by an earlier version."""
    digest: str | None = None
    """SHA-256 of all the rest but the data sets' places, which may be moved: as JSON with sorted
    keys and no spaces. None as above."""

    @property
    def own_digest(self) -> str:
        """The digest that belongs to these values."""
        left_out: dict[str, Any] = {"digest": True, "data": {"__all__": {"url"}}}
        if self.parent is None:  # as earlier versions, which knew of none, have it
            left_out["parent"] = True
        if self.origin is None:  # as earlier versions have it
            left_out["origin"] = True
        if self.mixtures is None:  # likewise
            left_out["mixtures"] = True
        content = self.model_dump(mode="json", exclude=left_out)
        canonical = json.dumps(content, sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(canonical.encode()).hexdigest()


def read_identity(run: Storage) -> RunIdentity | None:
    """The identity of the run in that folder; None where there is none yet.

    Raises:
        UserError: it is damaged.
    """
    try:
        found = read_record(RunIdentity, run, RUN_FILE)
    except FileNotFoundError:
        return None
    if found.digest is not None and found.digest != found.own_digest:
        raise UserError(f"{run.uri(RUN_FILE)}: does not match its own digest (altered)")
    if not found.data:
        raise UserError(f"{run.uri(RUN_FILE)}: data: none, expected a data set for every phase")
    return found


def write_identity(run: Storage, identity: RunIdentity, recipe: Recipe) -> None:
    """Writes the identity and the recipe of a run, as it is recorded."""
    dumped = dump_yaml(recipe.as_recorded().model_dump(mode="json")).encode()
    recipe_sha256 = hashlib.sha256(dumped).hexdigest()
    whole = identity.model_copy(update={"recipe_sha256": recipe_sha256})
    whole = whole.model_copy(update={"digest": whole.own_digest})
    run.write(dumped, RECIPE_FILE)
    run.write(whole.model_dump_json(indent=1).encode(), RUN_FILE)


def read_recipe(run: Storage, identity: RunIdentity) -> Recipe:
    """The recipe a run was started or last continued with.

    Raises:
        UserError: it is missing, damaged or altered; a line for each key. A file that was cut short
            can still be a whole recipe, of another model.
    """
    from elastrata.recipe.file import stored_recipe

    if problems := recipe_problems(run, identity):
        raise UserError(*(f"{line}; put back what it was" for line in problems))
    return stored_recipe(read_values(run, RECIPE_FILE), run.uri(RECIPE_FILE))


def read_values(storage: Storage, name: str) -> dict[str, Any]:
    """The values in a YAML file of ours, before anything gives it a meaning.

    Raises:
        UserError: it is missing, or no YAML of keys with values.
    """
    where = storage.uri(name)
    try:
        values = read_stored(storage, name)
    except FileNotFoundError:
        raise UserError(f"{where}: missing") from None
    if not isinstance(values, dict):
        raise UserError(f"{where}: damaged: expected keys with values, as in 'steps: 1000'")
    return values


def recipe_problems(run: Storage, identity: RunIdentity) -> list[str]:
    """A line where the recipe is not the one that the run was last continued with."""
    try:
        found = hashlib.sha256(read_bytes(run, RECIPE_FILE)).hexdigest()
    except FileNotFoundError:
        raise UserError(f"{run.uri(RECIPE_FILE)}: missing") from None
    if identity.recipe_sha256 in (None, found):
        return []
    return [f"{run.uri(RECIPE_FILE)}: altered since the run was last continued"]


def check_same_run(
    run: Storage, identity: RunIdentity, recipe: Recipe, data: Sequence[DataSet]
) -> None:
    """Refuses to continue a run as another one.

    Args:
        run: its folder.
        identity: what is in it.
        recipe: to go on with.
        data: the data sets of the recipe's phases.

    Raises:
        UserError: the recipe differs in keys that may not change, or the data set is another one.
    """
    # Through the model: keys that came with a later version have their defaults.
    stored = read_recipe(run, identity)
    before, now = _comparable(stored, recipe), _comparable(recipe, stored)
    problems = [
        f"{run.uri(RECIPE_FILE)}: {key}: {before.get(key)!r} in the run of this name, "
        f"{now.get(key)!r} in this recipe{_how_to_go_on(key, stored)}"
        for key in sorted(before.keys() | now.keys())
        if before.get(key) != now.get(key)
        and not _may_change(key)
        and not _goes_on(key, stored, recipe)
    ]
    for before_set, data_set in zip(identity.data, data, strict=False):
        if data_set.fingerprint != before_set.fingerprint:
            problems.append(
                f"{data_set.url}: not the data set that run '{identity.name}' trains on"
            )
    if problems:
        advice = f"run '{identity.name}' exists; choose another --name, or give it back its recipe"
        raise UserError(*problems, advice)


def _comparable(recipe: Recipe, other: Recipe) -> dict[str, Any]:
    """The values of a recipe, by dotted path; one that has no phases counts as one phase where the
    other has some."""
    from elastrata.recipe.recipe import PhaseKeys

    values = recipe.model_dump(mode="json")
    if (other.phases and not recipe.phases) or (recipe.phases and not other.phases):
        keys = set(PhaseKeys.model_fields)
        values = {key: value for key, value in values.items() if key not in keys}
        values["phases"] = [part.model_dump(mode="json", include=keys) for part in recipe.parts]
    return flatten(values)


def _goes_on(key: str, before: Recipe, now: Recipe) -> bool:
    """Whether a difference makes the run longer and leaves as it is what it has done."""
    if phase := re.match(r"phases\.(\d+)\.", key):
        return int(phase[1]) >= len(before.parts)
    old, new = before.parts[0], now.parts[0]
    return key == "steps" and _is_endless(before) and (new.steps or 0) >= (old.steps or 0)


def _is_endless(recipe: Recipe) -> bool:
    """Whether no step depends on how many come after it."""
    part = recipe.parts[0]
    constant = part.schedule.shape == "constant" and part.schedule.warmup_ratio is None
    steady = part.data.final_weights is None
    return not recipe.phases and constant and steady and part.sparsity is None


def _how_to_go_on(key: str, before: Recipe) -> str:
    """Advice for more steps, at the end of the line that refuses them."""
    if key != "steps" or _is_endless(before):
        return ""
    return (
        f"; the schedule ({before.parts[0].schedule.shape}) ends with the run: more steps are a "
        "new phase, as in phases: [{}, {steps: ...}], or a fork"
    )


def _may_change(key: str) -> bool:
    """Whether a run may be continued with another value under this path, in a phase or outside."""
    bare = re.sub(r"^phases\.\d+\.", "", key)
    bare = re.sub(r"^data\.sources\.\d+\.path$", "data.path", bare)
    return any(bare == part or bare.startswith(f"{part}.") for part in MAY_CHANGE)


def flatten(tree: Any, prefix: str = "") -> dict[str, Any]:
    """A nested dict as dotted paths. Sections in a list go by their number; other lists stay
    values."""
    if isinstance(tree, list) and tree and all(isinstance(item, dict) for item in tree):
        tree = dict(enumerate(tree))
    if not isinstance(tree, dict):
        return {prefix: tree}
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        flat |= flatten(value, f"{prefix}.{key}" if prefix else str(key))
    return flat


def resumed_recipe(run: Storage, overrides: Sequence[str] = ()) -> Recipe:
    """The recipe that a run was started or last continued with, for going on in the same folder,
    from whatever folder the command runs in.

    Args:
        run: its folder.
        overrides: `dotted.path=value`, the value in YAML.

    Raises:
        UserError: there is no such run, its recipe is damaged, or a mistake in the overrides.
    """
    from elastrata.recipe.file import load_recipe, stored_recipe, to_yaml

    identity = read_identity(run)
    if identity is None:
        raise UserError(f"{run.uri()}: no run here ({RUN_FILE} is missing)")
    if altered := recipe_problems(run, identity):
        advice = "put back what it was, and give the keys to change on the command line"
        raise UserError(*(f"{line}; {advice}" for line in altered))
    # Through the model: what an earlier version has written down in vain is no mistake.
    stored = stored_recipe(read_values(run, RECIPE_FILE), run.uri(RECIPE_FILE))
    storage, _, name = run.uri().rpartition("/")  # not the recorded name: a folder can be renamed
    places: dict[str, Any] = {"name": name, "storage": storage}
    places |= {key: data_set.url for key, data_set in _data_keys(run, identity)}
    written = [f"{key}={json.dumps(value)}" for key, value in places.items()]
    with NamedTemporaryFile(suffix=".yaml") as copy:
        copy.write(to_yaml(stored).encode())
        copy.flush()
        try:
            return load_recipe(copy.name, [*written, *overrides])
        except UserError as error:
            named = (line.replace(copy.name, run.uri(RECIPE_FILE)) for line in error.problems)
            raise UserError(*named) from None


def _data_keys(run: Storage, identity: RunIdentity) -> Iterator[tuple[str, DataSet]]:
    """Every data set with the key of the recipe that says where it is."""
    recipe, left = read_values(run, RECIPE_FILE), iter(identity.data)
    phases = recipe.get("phases") or [recipe]
    for number, part in enumerate(phases):
        prefix = f"phases.{number}." if recipe.get("phases") else ""
        sources = number_of_sources(part)
        keys = [f"sources.{source}.path" for source in range(sources)] or ["path"]
        yield from ((f"{prefix}data.{key}", one) for key, one in zip(keys, left, strict=False))


def number_of_sources(part: Mapping[str, Any]) -> int:
    """Sources of a phase, as its recipe has it; 0 where it has one data set."""
    data = part.get("data")
    sources = data.get("sources") if isinstance(data, Mapping) else None
    return len(sources) if isinstance(sources, list) else 0


_MOST = 2**64


@dataclass(frozen=True, kw_only=True)
class PhaseSummary:
    """The samples that a phase of a run takes from its data set, and their order."""

    size: PhaseSize
    seed: int
    window_stripes: int
    num_data_sets: int = 1
    """Its sources, where it has any."""


@dataclass(frozen=True, kw_only=True)
class RunSummary:
    """The values that decide how far a run goes, and on which samples."""

    phases: tuple[PhaseSummary, ...]
    """A single one where the recipe has none."""
    target: TargetConfig | None
    """None where there is none, as in runs of old."""

    @property
    def steps(self) -> int:
        """Optimizer steps in all."""
        return sum(phase.size.steps for phase in self.phases)


def read_summary(run: Storage) -> RunSummary:
    """That of the recipe in a run's folder.

    Raises:
        UserError: the recipe is missing or damaged.
    """
    recipe = read_values(run, RECIPE_FILE)
    damage = (AttributeError, KeyError, TypeError, ValueError, OverflowError)
    try:
        target = recipe.get("target")
        return RunSummary(
            phases=tuple(_phase(part, recipe["seed"]) for part in recipe.get("phases") or [recipe]),
            target=None if target is None else TargetConfig.model_validate(target),
        )
    except damage as error:
        line = str(error).splitlines()[0]
        raise UserError(
            f"{run.uri(RECIPE_FILE)}: damaged: {type(error).__name__}: {line}"
        ) from None


def _phase(part: Mapping[str, Any], seed: int) -> PhaseSummary:
    warmup = part.get("batch_size_warmup")
    return PhaseSummary(
        size=PhaseSize(
            steps=_number(part, "steps", 1),
            batch_size=_number(part, "batch_size", 1),
            warmup=BatchSizeWarmup.model_validate(warmup) if warmup else None,
        ),
        seed=_number({"seed": seed}, "seed", -_MOST),
        window_stripes=_number(part["data"], "window_stripes", 1),
        num_data_sets=number_of_sources(part) or 1,
    )


def _number(section: Mapping[str, Any], key: str, least: int) -> int:
    """A whole number of a recipe.

    Raises:
        ValueError: it is none, or out of range.
    """
    value = section[key]
    if type(value) is not int or not least <= value <= _MOST:
        raise ValueError(f"{key}: {value!r}: expected a whole number from {least} to {_MOST}")
    return value
