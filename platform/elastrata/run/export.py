"""The export of a run's model: a folder that transformers loads, and that the hub takes."""

from __future__ import annotations

import hashlib
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from torch import Tensor

from elastrata.checkpoints.commit import MARKER, Commit, problems
from elastrata.checkpoints.state import load
from elastrata.recipe.recipe import Recipe
from elastrata.run import history
from elastrata.run.audit import digest_of
from elastrata.run.claim import EXPORTING, check_local
from elastrata.run.consistency import chosen_commit
from elastrata.run.folder import RUN_FILE, DataSet, RunIdentity, read_identity, read_recipe
from elastrata.run.model_card import CARD, ModelCard
from elastrata.run.weights import TRAINED, read_weights
from elastrata.sparsity.layers import WEIGHT, layer_of, layer_shapes
from elastrata.sparsity.mask_file import MASKS_FILE, packed_masks
from elastrata.sparsity.masks import Masks, SparsePhase
from elastrata.step.average import AVERAGE
from elastrata.tracking.models import LoadableModel, write_mlmodel
from elastrata.workload.hf_folder import AS_TRAINED, WeightForm, num_numbers
from elastrata_pipelines.checked_json import read_bytes
from elastrata_pipelines.errors import UserError
from elastrata_pipelines.format import Manifest
from elastrata_pipelines.format.manifest import TOKENIZER_DIR
from elastrata_pipelines.storage import Storage


@dataclass(frozen=True, kw_only=True)
class ExportedModel:
    """A checkpoint as a folder that transformers loads."""

    path: Path
    """Absolute."""
    checkpoint: str
    """Where it lies."""
    step: int
    """Optimizer steps done in it."""
    metrics: Mapping[str, float]
    """The metrics of these weights' evaluation after that step; empty where there was none."""
    recipe: Recipe
    """The run's."""
    mlflow_run_id: str | None
    dtype: str = "float32"
    """Of the weights."""


def export(run_dir: str, out: Path, *, checkpoint: str = "newest", weights: str = TRAINED) -> Path:
    """Writes the model of a run for `from_pretrained`; returns the absolute path of the folder.

    See `export_model`.
    """
    return export_model(run_dir, out, checkpoint=checkpoint, weights=weights).path


def export_model(
    run_dir: str,
    out: Path,
    *,
    checkpoint: str = "newest",
    weights: str = TRAINED,
    form: WeightForm = AS_TRAINED,
) -> ExportedModel:
    """Writes the model of a run for `from_pretrained`, with its tokenizer and a card, and with a
    file of masks where weights were held at zero. Nothing is left of it where that fails; who may
    read it says the umask.

    Args:
        run_dir: the run's folder or URL.
        out: the folder to write; must be empty or missing.
        checkpoint: `newest`, `best` (smallest evaluation loss), or a step.
        weights: of the checkpoint: `trained`, `average` or `mean:K`, see `read_weights`.
        form: of the weights.

    Raises:
        UserError: there is no such run or checkpoint, it is damaged, or `out` is in use.
    """
    run = Storage(run_dir)
    identity = read_identity(run)
    if identity is None:
        raise UserError(f"{run.uri()}: no run here ({RUN_FILE} is missing)")
    check_free(out)
    checkpoints = run.sub("checkpoints")
    commit = chosen_commit(run, checkpoint)
    if damaged := problems(checkpoints, commit):
        raise UserError(f"checkpoint {checkpoints.uri(commit.folder)}: {damaged[0]}")
    recipe = read_recipe(run, identity)
    state = _state(run, commit, recipe, weights)
    metrics = commit.evaluation if weights == _evaluated(recipe) else {}
    manifests = [_manifest(data_set) for data_set in identity.data]
    with _filled_whole(out) as folder:
        data = Storage(identity.data[0].url)
        _write(recipe, checkpoints, commit, state, manifests, data, folder, form)
        card = model_card(run, identity, recipe, commit, manifests, form, _parameters(folder))
        card = replace(card, weights=weights, metrics=metrics)
        (folder / CARD).write_text(card.to_markdown(), encoding="utf-8")
    return ExportedModel(
        path=out.resolve(),
        recipe=recipe,
        mlflow_run_id=identity.mlflow_run_id,
        checkpoint=checkpoints.uri(commit.folder),
        step=commit.step,
        metrics=metrics,
        dtype=form.dtype_name,
    )


def check_free(out: Path) -> None:
    """Makes sure that nothing is where an export will be.

    Raises:
        UserError: there is something.
    """
    check_local(out)
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UserError(f"{out}: exists and is not an empty folder; choose another --out")


def loadable(model: ExportedModel, scratch: Path) -> LoadableModel:
    """An export as MLflow keeps it; what goes beside it is written to `scratch`."""
    task = model.recipe.workload.exported_as.task
    write_mlmodel(scratch, model.path, task=task, dtype=model.dtype)
    return LoadableModel(
        path=model.path,
        mlmodel=scratch,
        task=task,
        checkpoint=model.checkpoint,
        step=model.step,
        metrics=model.metrics,
    )


def _state(run: Storage, commit: Commit, recipe: Recipe, weights: str) -> Mapping[str, Tensor]:
    """The weights that are to be written, read one by one."""
    if weights != TRAINED and any(part.sparsity for part in recipe.parts):
        raise UserError(
            f"--weights: {weights}: expected {TRAINED}: a mean of sparse weights is zero only "
            "where all of them are"
        )
    return read_weights(run, commit, weights)


def _evaluated(recipe: Recipe) -> str:
    """The weights that the run's evaluations are of."""
    return AVERAGE if recipe.average and recipe.average.evaluated else TRAINED


def _write(
    recipe: Recipe,
    checkpoints: Storage,
    commit: Commit,
    state: Mapping[str, Tensor],
    manifests: Sequence[Manifest],
    data: Storage,
    folder: Path,
    form: WeightForm,
) -> None:
    """Writes the model into a folder that is not there yet, beside its tokenizer's."""
    recipe.workload.export(
        state,
        manifests[0].vocabulary,
        max(manifest.seq_len for manifest in manifests),
        _fetched_tokenizer(data, manifests[0], folder.with_name("tokenizer")),
        folder,
        form,
    )
    if masks := _masks(checkpoints, commit, recipe, state):
        (folder / MASKS_FILE).write_bytes(packed_masks(masks))


def model_card(
    run: Storage,
    identity: RunIdentity,
    recipe: Recipe,
    commit: Commit,
    manifests: Sequence[Manifest],
    form: WeightForm,
    parameters: int | None,
) -> ModelCard:
    """The card of a commit's export."""
    marker = run.read("checkpoints", commit.folder, MARKER)
    return ModelCard(
        name=run.uri().rpartition("/")[2],
        version=version("elastrata"),
        exported_as=recipe.workload.exported_as,
        dtype=form.dtype_name,
        parameters=parameters,
        steps=commit.step,
        samples=commit.samples,
        tokens=commit.tokens,
        metrics=commit.evaluation,
        checkpoint=commit.folder,
        checkpoint_sha256=hashlib.sha256(marker).hexdigest(),
        mlflow_run_id=identity.mlflow_run_id,
        digest=_digest(run, commit),
        parent=identity.parent,
        data=manifests,
        recipe=recipe.model_dump(mode="json"),
    )


def _digest(run: Storage, commit: Commit) -> str | None:
    """The audit's digest of all steps up to a commit; None where the history does not tell it."""
    try:
        entries = history.read(run.sub("history"))
    except UserError:
        return None
    steps = [s for s in history.effective_steps(entries) if s["step"] <= commit.step]
    return digest_of(steps) if steps else None


def _parameters(folder: Path) -> int | None:
    """The numbers in a folder's weight files; None where it has none by that name."""
    return num_numbers(folder) if any(folder.glob("model*.safetensors")) else None


@contextmanager
def _filled_whole(out: Path) -> Iterator[Path]:
    """A folder to fill, whose content is that of `out` when the block ends without error.

    Raises:
        UserError: `out` cannot be written.
    """
    target = Storage(str(out))
    with target.without_leftovers():
        try:
            with target.exclusive() as is_alone:
                if not is_alone:
                    raise UserError(f"--out: {out}: another command is writing there")
                check_free(out)  # again: another command may have begun there
                yield from _filled(out)
        except OSError as error:
            is_ours = str(error.filename or out).startswith(str(out))
            reason = error.strerror if is_ours else error  # the second names the other file
            raise UserError(f"--out: {out}: cannot be written ({reason})") from None


def _filled(out: Path) -> Iterator[Path]:
    with TemporaryDirectory(dir=out, prefix=EXPORTING) as scratch:
        folder = Path(scratch) / "model"
        yield folder
        _respect_umask(folder)
        # Nothing loads a folder without its configuration: it comes last, lest an export that was
        # killed here be taken for whole, without its tokenizer or its masks.
        for path in sorted(folder.iterdir(), key=lambda path: path.name == "config.json"):
            path.rename(out / path.name)


def _respect_umask(folder: Path) -> None:
    """Gives files and folders the mode of any new one: safetensors and temporary folders make them
    for their owner alone."""
    umask = os.umask(0o077)  # there is no way to ask without setting it
    os.umask(umask)
    for path in folder.rglob("*"):
        path.chmod(path.stat().st_mode | (0o777 if path.is_dir() else 0o666) & ~umask)


def _masks(
    checkpoints: Storage, commit: Commit, recipe: Recipe, state: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """The masks of a commit by layer, whole; empty where the model was dense then."""
    if not any(part.sparsity for part in recipe.parts):
        return {}
    shapes = layer_shapes(recipe.workload)
    matrices = {name: state[name] for name in (f"{layer}{WEIGHT}" for layer in shapes)}
    phases = [SparsePhase(part.num_steps, part.sparsity) for part in recipe.parts]
    masks = Masks(matrices, shapes, phases, seed=recipe.seed)
    masks.restore(commit.step, partial(load, checkpoints, commit))
    return {layer_of(name): mask for name, mask in masks.shards.items()}


def _manifest(data_set: DataSet) -> Manifest:
    data = Storage(data_set.url)
    manifest = Manifest.read(data)
    if manifest.fingerprint != data_set.fingerprint:
        raise UserError(f"{data.uri()}: not the data set any more that the run was trained on")
    return manifest


def _fetched_tokenizer(data: Storage, manifest: Manifest, folder: Path) -> Path | None:
    """The data set's tokenizer, copied to `folder`; None where it has none."""
    found = False
    folder.mkdir(exist_ok=True)
    for entry in manifest.files:
        if entry.path.startswith(f"{TOKENIZER_DIR}/"):
            try:
                content = read_bytes(data, entry.path, most=entry.bytes)
            except FileNotFoundError:
                raise UserError(f"{data.uri(entry.path)}: missing") from None
            if hashlib.sha256(content).hexdigest() != entry.sha256:
                raise UserError(f"{data.uri(entry.path)}: altered; prepare the data set again")
            (folder / Path(entry.path).name).write_bytes(content)
            found = True
    return folder if found else None


_LOGIN = "expected one in HF_TOKEN, or from `hf auth login`"


class HubRepository:
    """A repository of models. It is looked for, and made where it is missing, at once: what the hub
    refuses is told before there is anything to push.

    Args:
        name: `OWNER/NAME`, or a name alone, whose owner is that of the token.
        public: whether everybody sees it; where it is there already it stays as it is.

    Raises:
        UserError: that is no name, there is no token, the hub refuses it or cannot be reached.
    """

    def __init__(self, name: str, *, public: bool = False) -> None:
        from huggingface_hub import HfApi, get_token
        from huggingface_hub.utils.tqdm import disable_progress_bars

        if not sys.stderr.isatty():
            disable_progress_bars()
        self._shown = f"--push: {name}"
        # Read now, as any other setting: the library has read its own when it was imported.
        self._api = HfApi(endpoint=os.environ.get("HF_ENDPOINT") or None)
        with self._in_a_line():
            if get_token() is None:
                raise UserError(f"{self._shown}: no token for {self._api.endpoint}: {_LOGIN}")
            made = self._api.create_repo(name, private=not public, exist_ok=True)
        self._name = made.repo_id

    def push(self, folder: Path, message: str) -> str:
        """Makes the files of a folder the repository's newest commit; returns its URL.

        Files of an earlier push that the folder has no more are deleted: a model in one file would
        else go on beside the shards of another.

        Raises:
            UserError: the hub refuses them or cannot be reached.
        """
        with self._in_a_line():
            commit: Any = self._api.upload_folder(
                repo_id=self._name,
                folder_path=folder,
                commit_message=message,
                delete_patterns=["*.safetensors", "*.safetensors.index.json"],
            )
        return str(commit.commit_url)

    @contextmanager
    def _in_a_line(self) -> Iterator[None]:
        """What goes wrong is told in a line."""
        from huggingface_hub.errors import HfHubHTTPError, HFValidationError

        try:
            yield
        except UserError:
            raise
        except HFValidationError as error:
            raise UserError(f"{self._shown}: {_first_line(error)}") from None
        except HfHubHTTPError as error:
            status = f"{error.response.status_code} {error.response.reason_phrase}"
            said = error.server_message or "no reason given"
            raise UserError(
                f"{self._shown}: refused by {self._api.endpoint}: {status}: {_shortened(said)}"
            ) from None
        except (OSError, RuntimeError, ValueError) as error:
            raise UserError(f"{self._shown}: {self._api.endpoint}: {_first_line(error)}") from error
        except Exception as error:  # the client's transport has errors of its own
            if type(error).__module__.partition(".")[0] not in ("httpx", "httpx2", "httpcore2"):
                raise
            raise UserError(
                f"{self._shown}: {self._api.endpoint}: cannot be reached ({_first_line(error)})"
            ) from error


def _first_line(error: Exception) -> str:
    return _shortened(str(error).strip() or type(error).__name__)


def _shortened(text: str) -> str:
    return " ".join(text.split())[:300]
