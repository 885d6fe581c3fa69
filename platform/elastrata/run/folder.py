"""The folder of a run: its identity, its recipe, its data sets and its initial weights."""

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

# The recipe imports torch, which `status` and `audit` do not need.
if TYPE_CHECKING:
    from elastrata.recipe.recipe import Recipe


class ForkOrigin(Record):
    """The checkpoint of another run, the parent, from which a fork continues."""

    url: Annotated[str, Field(min_length=1, max_length=10_000)]
    """The parent's folder; absolute."""
    commit: Annotated[str, Field(pattern=r"^[0-9]{9}-[0-9]{4,9}-[0-9a-f]{6}$")]
    """Name of the parent's checkpoint."""
    sha256: Annotated[str, Field(pattern="^[0-9a-f]{64}$")]
    """SHA-256 of the checkpoint's marker, which holds the checksums of its files."""
    step: NonNegativeInt
    """Steps done in the checkpoint."""
    samples: NonNegativeInt
    """Samples seen."""
    tokens: NonNegativeInt
    """Tokens seen."""
    positions: dict[str, NonNegativeInt]
    """By data set fingerprint, the samples already taken of each data set that the fork continues
    in the same order. Other data sets start with their first sample."""

    @override
    def __str__(self) -> str:
        return f"{self.url}, step {self.step} (SHA-256 {self.sha256[:12]})"

    def placed(self, data: Mapping[Key, str]) -> Origin[Key]:
        """Return the origin from which phases are counted.

        Args:
            data: the fingerprint of each data set, by its key.
        """
        known_positions = {key: self.positions.get(value, 0) for key, value in data.items()}
        return Origin(step=self.step, samples=self.samples, positions=known_positions)

    def to_tags(self) -> dict[str, str]:
        """Return the tags of the run's tracking record."""
        return {"parent": self.url, "parent.step": str(self.step), "parent.sha256": self.sha256}


class Parent(Record):
    """The initial weights of a run, as recorded in `run.json`."""

    kind: Literal["run", "folder", "hub"]
    """A checkpoint of another run, a transformers folder, or a model of the Hugging Face Hub."""
    url: Annotated[str, Field(min_length=1, max_length=10_000)]
    """The folder of the run or of the weights, absolute; hub: the model's name."""
    sha256: Annotated[str, Field(pattern="^[0-9a-f]{64}$")]
    """run: of the checkpoint's marker, which holds the checksums of its files. Else: of the lines
    that `sha256sum` prints for config.json and the safetensors files, sorted by name."""
    num_ids: NonNegativeInt
    """Number of token ids that it knows; embeddings of later ids are initialised at random."""
    commit: str | None = None
    """run: the checkpoint's name. hub: the revision."""
    step: NonNegativeInt | None = None
    """run: optimizer steps of the checkpoint."""
    samples: NonNegativeInt | None = None
    """run: samples of the checkpoint."""
    optimizer: bool = False
    """Whether the optimizer's state is loaded as well."""

    @override
    def __str__(self) -> str:
        step = "" if self.step is None else f", step {self.step}"
        return f"{self.url}{step} (SHA-256 {self.sha256[:12]})"

    def to_tags(self) -> dict[str, str]:
        """Return the tags of the run's tracking record."""
        tags = {"parent": self.url, "parent.sha256": self.sha256}
        return tags if self.step is None else {**tags, "parent.step": str(self.step)}


Share = Annotated[int, Field(ge=0, le=UNITS)]
Positions = Annotated[int, Field(ge=0, lt=2**62)]


class LegRecord(Record):
    """A stored `Leg` of a mixture."""

    shares: Annotated[tuple[Share, ...], Field(min_length=1)]
    final_shares: tuple[Share, ...] | None = None
    length: Annotated[int, Field(ge=1, lt=2**62)]
    stop: Positions | None = None


Mixtures = tuple[tuple[LegRecord, ...], ...]
"""The legs of each phase's mixture; empty for a phase with one data set."""


def record_of(mixtures: Sequence[Mixture | None]) -> Mixtures | None:
    """Return the record of the phases' mixtures; None if no phase has a mixture."""
    if not any(mixtures):
        return None
    return tuple(
        tuple(LegRecord.model_validate(vars(leg)) for leg in mixture.legs) if mixture else ()
        for mixture in mixtures
    )


def mixtures_of(record: Mixtures | None, num_phases: int) -> tuple[Mixture | None, ...]:
    """Return the mixture of each phase.

    Raises:
        ValueError: the number of phases is wrong, or the shares do not add up.
    """
    if record is None:
        return (None,) * num_phases
    if len(record) != num_phases:
        raise ValueError(f"{len(record)} mixtures, expected {num_phases}")
    return tuple(
        Mixture(tuple(Leg(**leg.model_dump()) for leg in legs)) if legs else None for legs in record
    )


RUN_FILE, RECIPE_FILE, GIVEN_FILE = "run.json", "recipe.yaml", "given.yaml"
"""Files with the identity, the complete recipe, and the short one as the user gave it."""
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
"""Recipe keys whose value may change when a run continues: they affect where and how the same
samples are computed, not what is learned from them."""


class DataSet(Record):
    """A data set that a run trains on."""

    url: Text
    """Absolute path or URL, as of the newest launch."""
    fingerprint: Text
    """The fingerprint in its manifest."""


class RunIdentity(Record):
    """The identity of a run, which stays the same across restarts."""

    name: Text
    data: tuple[DataSet, ...]
    """The data set of every phase; for a phase with sources, those of its sources in order."""
    mlflow_run_id: Annotated[str, Field(max_length=10_000)] | None = None
    parent: Parent | None = None
    """The initial weights; None: initialised at random."""
    origin: ForkOrigin | None = None
    """The checkpoint of another run that it continues from; None if it is not a fork."""
    mixtures: Mixtures | None = None
    """How every phase mixes its sources; None if no phase has sources."""
    recipe_sha256: str | None = None
    """SHA-256 of the recipe's file; None if written by an earlier version."""
    digest: str | None = None
    """SHA-256 of all other values but the data sets' URLs: of JSON with sorted keys and no spaces.
    None if written by an earlier version."""

    @property
    def own_digest(self) -> str:
        """The digest computed from the current values."""
        excluded_fields: dict[str, Any] = {"digest": True, "data": {"__all__": {"url"}}}
        # Fields of later versions are left out while they are unset, so that digests of earlier
        # versions still match.
        if self.parent is None:
            excluded_fields["parent"] = True
        if self.origin is None:
            excluded_fields["origin"] = True
        if self.mixtures is None:
            excluded_fields["mixtures"] = True
        content = self.model_dump(mode="json", exclude=excluded_fields)
        canonical = json.dumps(content, sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(canonical.encode()).hexdigest()


def read_identity(run: Storage) -> RunIdentity | None:
    """Return the identity of the run in a folder; None if there is no run yet.

    Raises:
        UserError: the file is damaged.
    """
    try:
        found = read_record(RunIdentity, run, RUN_FILE)
    except FileNotFoundError:
        return None
    # Earlier versions stored no digest.
    if found.digest is not None and found.digest != found.own_digest:
        raise UserError(f"{run.uri(RUN_FILE)}: does not match its own digest (altered)")
    if not found.data:
        raise UserError(f"{run.uri(RUN_FILE)}: data: empty, expected a data set for every phase")
    return found


def write_identity(run: Storage, identity: RunIdentity, recipe: Recipe) -> None:
    """Write the identity and the recipe of a run."""
    dumped = dump_yaml(recipe.without_preparation().model_dump(mode="json")).encode()
    recipe_sha256 = hashlib.sha256(dumped).hexdigest()
    complete_identity = identity.model_copy(update={"recipe_sha256": recipe_sha256})
    complete_identity = complete_identity.model_copy(
        update={"digest": complete_identity.own_digest}
    )
    # run.json comes last: it makes the folder a run.
    run.write(dumped, RECIPE_FILE)
    if recipe.given is not None:
        run.write(recipe.given.encode(errors="backslashreplace"), GIVEN_FILE)
    run.write(complete_identity.model_dump_json(indent=1).encode(), RUN_FILE)


def read_recipe(run: Storage, identity: RunIdentity) -> Recipe:
    """Return the recipe with which a run was started or last continued.

    Raises:
        UserError: the recipe is missing, damaged or altered; one line per key.
    """
    from elastrata.recipe.file import parse_stored_recipe

    # A file that was cut short can still be a valid recipe, of another model.
    if problems := recipe_problems(run, identity):
        raise UserError(*(f"{line}; restore the file" for line in problems))
    return parse_stored_recipe(read_values(run, RECIPE_FILE), run.uri(RECIPE_FILE))


def read_values(storage: Storage, name: str) -> dict[str, Any]:
    """Return the values of a YAML file in a run's folder, without validating them.

    Raises:
        UserError: the file is missing or does not hold YAML keys with values.
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
    """Return one line if the recipe is not the one that the run was last continued with."""
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
    """Check that a recipe may continue a run.

    Args:
        run: the run's folder.
        identity: the identity stored in it.
        recipe: the recipe to continue with.
        data: the data sets of the recipe's phases.

    Raises:
        UserError: keys that may not change differ, or a data set is another one.
    """
    # Through the model, so that keys added by later versions have their defaults.
    stored = read_recipe(run, identity)
    before, now = _comparable_values(stored, recipe), _comparable_values(recipe, stored)
    problems = [
        f"{run.uri(RECIPE_FILE)}: {key}: {before.get(key)!r} in the run of this name, "
        f"{now.get(key)!r} in this recipe{_extension_advice(key, stored)}"
        for key in sorted(before.keys() | now.keys())
        if before.get(key) != now.get(key)
        and not _may_change(key)
        # More steps are allowed if no earlier step depends on their number.
        and not _only_extends(key, stored, recipe)
        # A run keeps the precision that it began with.
        and (key, now.get(key)) != ("precision", "auto")
    ]
    for before_set, data_set in zip(identity.data, data, strict=False):
        if data_set.fingerprint != before_set.fingerprint:
            problems.append(
                f"{data_set.url}: not the data set that run '{identity.name}' trains on"
            )
    if problems:
        advice = f"run '{identity.name}' exists; choose another --name, or restore its recipe"
        raise UserError(*problems, advice)


def _comparable_values(recipe: Recipe, other: Recipe) -> dict[str, Any]:
    """Return a recipe's values by dotted path, as one phase if only the other recipe has phases."""
    from elastrata.recipe.recipe import PhaseKeys

    values = recipe.model_dump(mode="json")
    if (other.phases and not recipe.phases) or (recipe.phases and not other.phases):
        # A recipe without phases is compared as one with a single phase.
        keys = set(PhaseKeys.model_fields)
        values = {key: value for key, value in values.items() if key not in keys}
        values["phases"] = [part.model_dump(mode="json", include=keys) for part in recipe.parts]
    return flatten(values)


def _only_extends(key: str, before: Recipe, now: Recipe) -> bool:
    """Return whether a difference makes the run longer and changes no step already done."""
    if phase := re.match(r"phases\.(\d+)\.", key):
        # Only phases after the existing ones may be added.
        return int(phase[1]) >= len(before.parts)
    old, new = before.parts[0], now.parts[0]
    return key == "steps" and _is_endless(before) and (new.steps or 0) >= (old.steps or 0)


def _is_endless(recipe: Recipe) -> bool:
    """Return whether no step depends on the number of steps after it."""
    part = recipe.parts[0]
    # A decay, a warmup ratio, final weights and a sparsity schedule all depend on the total.
    constant = part.schedule.shape == "constant" and part.schedule.warmup_ratio is None
    steady = part.data.final_weights is None
    return not recipe.phases and constant and steady and part.sparsity is None


def _extension_advice(key: str, before: Recipe) -> str:
    """Return how to train for more steps, to append to the refusal."""
    if key != "steps" or _is_endless(before):
        return ""
    return (
        f"; the schedule ({before.parts[0].schedule.shape}) ends with the run: more steps are a "
        "new phase, as in phases: [{}, {steps: ...}], or a fork"
    )


def _may_change(key: str) -> bool:
    """Return whether the value at this path may change when a run continues."""
    # The same keys may change in a phase and in a source.
    bare = re.sub(r"^phases\.\d+\.", "", key)
    bare = re.sub(r"^data\.sources\.\d+\.path$", "data.path", bare)
    return any(bare == part or bare.startswith(f"{part}.") for part in MAY_CHANGE)


def flatten(tree: Any, prefix: str = "") -> dict[str, Any]:
    """Return a nested dict as dotted paths.

    Sections in a list are numbered; other lists stay values.
    """
    if isinstance(tree, list) and tree and all(isinstance(item, dict) for item in tree):
        tree = dict(enumerate(tree))
    if not isinstance(tree, dict):
        return {prefix: tree}
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        flat |= flatten(value, f"{prefix}.{key}" if prefix else str(key))
    return flat


def read_resumed_recipe(run: Storage, overrides: Sequence[str] = ()) -> Recipe:
    """Return the recipe with which a run was last continued, to continue it in the same folder.

    It works from any current directory.

    Args:
        run: the run's folder.
        overrides: `dotted.path=value`, the value in YAML.

    Raises:
        UserError: there is no such run, its recipe is damaged, or the overrides are invalid.
    """
    from elastrata.recipe.file import load_recipe, parse_stored_recipe, to_yaml
    from elastrata.recipe.yaml_reader import append_overrides

    identity = read_identity(run)
    if identity is None:
        raise UserError(f"{run.uri()}: no run here ({RUN_FILE} is missing)")
    if altered := recipe_problems(run, identity):
        advice = "restore the file, and change keys on the command line"
        raise UserError(*(f"{line}; {advice}" for line in altered))
    # Through the model: it accepts keys that earlier versions wrote and that no longer exist.
    stored = parse_stored_recipe(read_values(run, RECIPE_FILE), run.uri(RECIPE_FILE))
    # Not the recorded name, because the folder may have been renamed.
    storage, _, name = run.uri().rpartition("/")
    places: dict[str, Any] = {"name": name, "storage": storage}
    places |= {key: data_set.url for key, data_set in _data_keys(run, identity)}
    stored_overrides = [f"{key}={json.dumps(value)}" for key, value in places.items()]
    # `load_recipe` reads overrides on top of a file: write the stored recipe to one.
    with NamedTemporaryFile(suffix=".yaml") as copy:
        copy.write(to_yaml(stored).encode())
        copy.flush()
        try:
            recipe = load_recipe(copy.name, [*stored_overrides, *overrides])
        except UserError as error:
            # Messages must name the run's file, not the temporary copy.
            lines = (line.replace(copy.name, run.uri(RECIPE_FILE)) for line in error.problems)
            raise UserError(*lines) from None
    given = run.read(GIVEN_FILE).decode(errors="replace") if run.exists(GIVEN_FILE) else None
    recipe.__dict__["given"] = given and append_overrides(given, overrides)
    return recipe


def _data_keys(run: Storage, identity: RunIdentity) -> Iterator[tuple[str, DataSet]]:
    """Yield every data set with the recipe key that holds its path."""
    recipe, remaining_data = read_values(run, RECIPE_FILE), iter(identity.data)
    phases = recipe.get("phases") or [recipe]
    for number, part in enumerate(phases):
        prefix = f"phases.{number}." if recipe.get("phases") else ""
        sources = number_of_sources(part)
        keys = [f"sources.{source}.path" for source in range(sources)] or ["path"]
        yield from (
            (f"{prefix}data.{key}", one) for key, one in zip(keys, remaining_data, strict=False)
        )


def number_of_sources(part: Mapping[str, Any]) -> int:
    """Return the number of sources of a phase; 0 if it has a single data set."""
    data = part.get("data")
    sources = data.get("sources") if isinstance(data, Mapping) else None
    return len(sources) if isinstance(sources, list) else 0


_MOST = 2**64


@dataclass(frozen=True, kw_only=True)
class PhaseSummary:
    """The samples that a phase takes of its data sets, and their order."""

    size: PhaseSize
    seed: int
    window_stripes: int
    num_data_sets: int = 1
    """Number of sources, or 1."""


@dataclass(frozen=True, kw_only=True)
class RunSummary:
    """The values that determine how far a run goes, and on which samples."""

    phases: tuple[PhaseSummary, ...]
    """A single phase if the recipe has none."""
    target: TargetConfig | None
    """None if the recipe has no target."""

    @property
    def steps(self) -> int:
        """Total number of optimizer steps."""
        return sum(phase.size.steps for phase in self.phases)


def read_summary(run: Storage) -> RunSummary:
    """Return the summary of the recipe in a run's folder.

    Raises:
        UserError: the recipe is missing or damaged.
    """
    recipe = read_values(run, RECIPE_FILE)
    # A recipe that was edited by hand can fail in any of these ways.
    damage = (AttributeError, KeyError, TypeError, ValueError, OverflowError)
    try:
        target = recipe.get("target")
        return RunSummary(
            phases=tuple(
                _phase_summary(part, recipe["seed"]) for part in recipe.get("phases") or [recipe]
            ),
            target=None if target is None else TargetConfig.model_validate(target),
        )
    except damage as error:
        line = str(error).splitlines()[0]
        raise UserError(
            f"{run.uri(RECIPE_FILE)}: damaged: {type(error).__name__}: {line}"
        ) from None


def _phase_summary(part: Mapping[str, Any], seed: int) -> PhaseSummary:
    """Return the summary of a recipe's phase."""
    warmup = part.get("batch_size_warmup")
    return PhaseSummary(
        size=PhaseSize(
            steps=_read_int(part, "steps", 1),
            batch_size=_read_int(part, "batch_size", 1),
            warmup=BatchSizeWarmup.model_validate(warmup) if warmup else None,
        ),
        seed=_read_int({"seed": seed}, "seed", -_MOST),
        window_stripes=_read_int(part["data"], "window_stripes", 1),
        num_data_sets=number_of_sources(part) or 1,
    )


def _read_int(section: Mapping[str, Any], key: str, least: int) -> int:
    """Return an integer of a recipe.

    Raises:
        ValueError: the value is not an integer or out of range.
    """
    value = section[key]
    # Not isinstance: True is an int as well.
    if type(value) is not int or not least <= value <= _MOST:
        raise ValueError(f"{key}: {value!r}: expected a whole number from {least} to {_MOST}")
    return value
