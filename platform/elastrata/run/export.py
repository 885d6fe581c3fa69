"""Export of a run's model as a transformers folder, and upload to the Hugging Face Hub."""

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

from elastrata.checkpoints.commit import MARKER, Commit, file_problems
from elastrata.checkpoints.state import load
from elastrata.recipe.recipe import Recipe
from elastrata.run import history
from elastrata.run.audit import digest_of
from elastrata.run.claim import EXPORTING, check_local
from elastrata.run.consistency import choose_commit
from elastrata.run.folder import RUN_FILE, DataSet, RunIdentity, read_identity, read_recipe
from elastrata.run.model_card import CARD, ModelCard
from elastrata.run.weights import TRAINED, read_weights
from elastrata.sparsity.layers import WEIGHT, layer_of, layer_shapes
from elastrata.sparsity.mask_file import MASKS_FILE, pack_masks
from elastrata.sparsity.masks import Masks, SparsePhase
from elastrata.step.average import AVERAGE
from elastrata.tracking.models import LoadableModel, write_mlmodel
from elastrata.workload.hf_folder import AS_TRAINED, WeightForm, num_numbers
from elastrata_pipelines.checked_json import read_bytes
from elastrata_pipelines.errors import UserError
from elastrata_pipelines.format import Manifest
from elastrata_pipelines.format.manifest import TOKENIZER_DIR
from elastrata_pipelines.storage import Storage, name_full_disk
from elastrata_pipelines.waits import reach_hub


@dataclass(frozen=True, kw_only=True)
class ExportedModel:
    """A checkpoint exported as a transformers folder."""

    path: Path
    """The folder; absolute."""
    checkpoint: str
    """Path or URL of the checkpoint."""
    step: int
    """Optimizer steps done in it."""
    metrics: Mapping[str, float]
    """Metrics of the evaluation of these weights after that step; empty without one."""
    recipe: Recipe
    """The run's recipe."""
    mlflow_run_id: str | None
    dtype: str = "float32"
    """The dtype of the weights."""


def export(run_dir: str, out: Path, *, checkpoint: str = "newest", weights: str = TRAINED) -> Path:
    """Export the model of a run for `from_pretrained`; return the absolute path of the folder.

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
    """Export the model of a run for `from_pretrained`, with its tokenizer and a model card.

    If weights were held at zero, a file of masks is written as well. If the export fails, nothing
    is left in the folder. File modes follow the umask.

    Args:
        run_dir: the run's folder or URL.
        out: the folder to write; must be empty or missing.
        checkpoint: `newest`, `best` (smallest evaluation loss), or a step.
        weights: weights of the checkpoint: `trained`, `average` or `mean:K`, see `read_weights`.
        form: layout and dtype of the exported weights.

    Raises:
        UserError: there is no such run or checkpoint, it is damaged, or `out` is in use.
    """
    run = Storage(run_dir)
    identity = read_identity(run)
    if identity is None:
        raise UserError(f"{run.uri()}: no run here ({RUN_FILE} is missing)")
    check_free(out)
    checkpoints = run.sub("checkpoints")
    commit = choose_commit(run, checkpoint)
    if damaged := file_problems(checkpoints, commit):
        raise UserError(f"checkpoint {checkpoints.uri(commit.folder)}: {damaged[0]}")
    recipe = read_recipe(run, identity)
    state = _read_state(run, commit, recipe, weights)
    # The evaluation is of one kind of weights: its metrics must not describe another kind.
    metrics = commit.evaluation if weights == _weights_of_evaluations(recipe) else {}
    manifests = [_read_manifest(data_set) for data_set in identity.data]
    with _write_atomically(out) as folder:
        data = Storage(identity.data[0].url)
        _write(recipe, checkpoints, commit, state, manifests, data, folder, form)
        card = model_card(run, identity, recipe, commit, manifests, form, _count_parameters(folder))
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
    """Check that an export can be written to a folder.

    Raises:
        UserError: the folder exists and is not empty, or `out` is a URL.
    """
    check_local(out)
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UserError(f"{out}: exists and is not an empty folder; choose another --out")


def to_loadable(model: ExportedModel, scratch: Path) -> LoadableModel:
    """Return an export in the form that MLflow stores.

    Args:
        model: the export.
        scratch: folder for the additional files that MLflow needs.
    """
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


def _read_state(run: Storage, commit: Commit, recipe: Recipe, weights: str) -> Mapping[str, Tensor]:
    """Return the weights to export, read one tensor at a time."""
    # Masks change during training, so a mean of such weights is less sparse than each.
    if weights != TRAINED and any(part.sparsity for part in recipe.parts):
        raise UserError(
            f"--weights: {weights}: expected {TRAINED}: a mean of sparse weights is zero only "
            "if all of them are"
        )
    return read_weights(run, commit, weights)


def _weights_of_evaluations(recipe: Recipe) -> str:
    """Return which weights the run's evaluations used."""
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
    """Write the model and its masks to a new folder, and its tokenizer to one next to it."""
    recipe.workload.export(
        state,
        manifests[0].vocabulary,
        max(manifest.seq_len for manifest in manifests),
        _fetch_tokenizer(data, manifests[0], folder.with_name("tokenizer")),
        folder,
        form,
    )
    if masks := _load_masks(checkpoints, commit, recipe, state):
        (folder / MASKS_FILE).write_bytes(pack_masks(masks))


def model_card(
    run: Storage,
    identity: RunIdentity,
    recipe: Recipe,
    commit: Commit,
    manifests: Sequence[Manifest],
    form: WeightForm,
    parameters: int | None,
) -> ModelCard:
    """Return the model card for the export of a commit."""
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
        digest=_samples_digest(run, commit),
        parent=identity.parent,
        data=manifests,
        recipe=recipe.model_dump(mode="json"),
    )


def _samples_digest(run: Storage, commit: Commit) -> str | None:
    """Return the audit digest of all steps up to a commit; None without a readable history."""
    try:
        # A model can be exported even if the history of its run is damaged.
        entries = history.read_entries(run.sub("history"))
    except UserError:
        return None
    steps = [s for s in history.effective_steps(entries) if s["step"] <= commit.step]
    return digest_of(steps) if steps else None


def _count_parameters(folder: Path) -> int | None:
    """Return the number of values in a folder's weight files; None if it has none of that name."""
    return num_numbers(folder) if any(folder.glob("model*.safetensors")) else None


@contextmanager
def _write_atomically(out: Path) -> Iterator[Path]:
    """Yield a temporary folder whose content moves to `out` if the block succeeds.

    Raises:
        UserError: `out` cannot be written.
    """
    target = Storage(str(out))
    with target.removing_empty_folders():
        try:
            # Two exports into one folder would mix their files.
            with target.hold_lock() as is_alone:
                if not is_alone:
                    raise UserError(f"--out: {out}: another command is writing there")
                check_free(out)  # again, as another command may have written meanwhile
                with name_full_disk(out):  # safetensors raises errors of its own
                    yield from _fill_and_move(out)
        except OSError as error:
            # An OSError can also be about the checkpoint that is read.
            is_ours = Path(error.filename or out).absolute().is_relative_to(out.absolute())
            reason = error.strerror if is_ours else error  # `error` names the other file
            raise UserError(f"--out: {out}: cannot be written ({reason})") from None


def _fill_and_move(out: Path) -> Iterator[Path]:
    """Yield a temporary folder inside `out`, and move its files to `out` afterwards."""
    # Inside `out`, so that renames stay on one file system.
    with TemporaryDirectory(dir=out, prefix=EXPORTING) as scratch:
        folder = Path(scratch) / "model"
        yield folder
        _respect_umask(folder)
        # Nothing loads a folder without config.json. It comes last, so that an export that is
        # killed here cannot pass as complete without its tokenizer or its masks.
        for path in sorted(folder.iterdir(), key=lambda path: path.name == "config.json"):
            path.rename(out / path.name)


def _respect_umask(folder: Path) -> None:
    """Set the modes that new files and folders normally have."""
    umask = os.umask(0o077)  # the umask cannot be read without setting it
    os.umask(umask)
    # safetensors and TemporaryDirectory create files and folders that only their owner can read.
    for path in folder.rglob("*"):
        path.chmod(path.stat().st_mode | (0o777 if path.is_dir() else 0o666) & ~umask)


def _load_masks(
    checkpoints: Storage, commit: Commit, recipe: Recipe, state: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Return the full masks of a commit by layer; empty if the model was dense at that step."""
    if not any(part.sparsity for part in recipe.parts):
        return {}
    shapes = layer_shapes(recipe.workload)
    matrices = {name: state[name] for name in (f"{layer}{WEIGHT}" for layer in shapes)}
    phases = [SparsePhase(part.num_steps, part.sparsity) for part in recipe.parts]
    masks = Masks(matrices, shapes, phases, seed=recipe.seed)
    masks.restore(commit.step, partial(load, checkpoints, commit))
    return {layer_of(name): mask for name, mask in masks.shards.items()}


def _read_manifest(data_set: DataSet) -> Manifest:
    """Return a data set's manifest, after checking that the data set is unchanged."""
    data = Storage(data_set.url)
    manifest = Manifest.read(data)
    if manifest.fingerprint != data_set.fingerprint:
        raise UserError(f"{data.uri()}: no longer the data set that the run was trained on")
    return manifest


def _fetch_tokenizer(data: Storage, manifest: Manifest, folder: Path) -> Path | None:
    """Copy the data set's tokenizer to `folder` and return it; None if there is no tokenizer."""
    found = False
    folder.mkdir(exist_ok=True)
    for entry in manifest.files:
        if entry.path.startswith(f"{TOKENIZER_DIR}/"):
            try:
                # Limited to the manifest's size, as the file may have been replaced by a larger
                # one.
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
    """A model repository on the Hugging Face Hub, created if it does not exist.

    Args:
        name: `OWNER/NAME`, or `NAME` for the owner of the token.
        public: whether a new repository is public; an existing one keeps its visibility.

    Raises:
        UserError: the name is invalid, there is no token, or the hub refuses the request or cannot
            be reached.
    """

    def __init__(self, name: str, *, public: bool = False) -> None:
        from huggingface_hub import HfApi, get_token
        from huggingface_hub.utils.tqdm import disable_progress_bars

        # Progress bars would fill log files.
        if not sys.stderr.isatty():
            disable_progress_bars()
        self._shown = f"--push: {name}"
        # Read now, because the library reads its own setting only when it is imported.
        self._api = HfApi(endpoint=os.environ.get("HF_ENDPOINT") or None)
        with self._hub_errors():
            if get_token() is None:
                raise UserError(f"{self._shown}: no token for {self._api.endpoint}: {_LOGIN}")
            if failure := reach_hub("/api/models?limit=1"):
                raise UserError(
                    f"{self._shown}: {self._api.endpoint}: cannot be reached ({failure})"
                )
            # Created now, so that refusals are reported before the export takes its time.
            repository = self._api.create_repo(name, private=not public, exist_ok=True)
        self._name = repository.repo_id

    def push(self, folder: Path, message: str) -> str:
        """Commit the files of a folder to the repository; return the commit's URL.

        Weight files of an earlier push that are not in the folder are deleted.

        Raises:
            UserError: the hub refuses the files or cannot be reached.
        """
        with self._hub_errors():
            commit: Any = self._api.upload_folder(
                repo_id=self._name,
                folder_path=folder,
                commit_message=message,
                # A model in one file would otherwise stay next to the shards of another.
                delete_patterns=["*.safetensors", "*.safetensors.index.json"],
            )
        return str(commit.commit_url)

    @contextmanager
    def _hub_errors(self) -> Iterator[None]:
        """Turn any error of the hub or its client into a `UserError` of one line."""
        from huggingface_hub.errors import HfHubHTTPError, HFValidationError

        try:
            yield
        except UserError:
            raise
        except HFValidationError as error:
            raise UserError(f"{self._shown}: {_first_line(error)}") from None
        except HfHubHTTPError as error:
            status = f"{error.response.status_code} {error.response.reason_phrase}"
            message = error.server_message or "no reason given"
            raise UserError(
                f"{self._shown}: refused by {self._api.endpoint}: {status}: {_shorten(message)}"
            ) from None
        except (OSError, RuntimeError, ValueError) as error:
            raise UserError(f"{self._shown}: {self._api.endpoint}: {_first_line(error)}") from error
        except Exception as error:  # the HTTP transport's errors have no common base
            if type(error).__module__.partition(".")[0] not in ("httpx", "httpx2", "httpcore2"):
                raise
            raise UserError(
                f"{self._shown}: {self._api.endpoint}: cannot be reached ({_first_line(error)})"
            ) from error


def _first_line(error: Exception) -> str:
    return _shorten(str(error).strip() or type(error).__name__)


def _shorten(text: str) -> str:
    return " ".join(text.split())[:300]
