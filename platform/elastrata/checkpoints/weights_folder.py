"""A folder with a model as transformers saves it: its files, configuration and checksum."""

from __future__ import annotations

import hashlib
import re
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from elastrata.checkpoints.commit import FolderName
from elastrata.checkpoints.safetensors_files import SafetensorsFolder
from elastrata_pipelines.checked_json import read_bytes
from elastrata_pipelines.errors import UserError, suggest_nearest
from elastrata_pipelines.preparation.tokenizer import TokenizerFiles, load_tokenizer
from elastrata_pipelines.storage import Storage
from elastrata_pipelines.waits import reach_hub, waiting_for

CONFIG = "config.json"
TOKENIZER = "tokenizer.json"
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?")
# No pickles: the hub's older weights may run code when they are loaded.
_WANTED = ("*.json", "*.safetensors")
_THREADS = 4


@dataclass(frozen=True)
class WeightsFolder:
    """A folder with weights, configuration and tokenizer."""

    storage: Storage
    """Place of the files; for a model of the Hugging Face hub, in this machine's cache."""
    hub_revision: str | None = None
    """Commit of a model that came from the hub; None for other folders."""

    @property
    def weights(self) -> SafetensorsFolder:
        """The tensors of the folder."""
        return SafetensorsFolder(self.storage)

    def config(self) -> Any:
        """Return the configuration, as transformers reads it.

        Raises:
            UserError: it is missing, or transformers does not know such a model.
        """
        # Imported here because transformers takes seconds to import.
        from transformers import AutoConfig

        where = self.storage.uri(CONFIG)
        try:
            content = read_bytes(self.storage, CONFIG)
        except FileNotFoundError:
            raise UserError(f"{where}: missing: not a model of transformers") from None
        with tempfile.TemporaryDirectory(prefix="elastrata-") as scratch:
            (Path(scratch) / CONFIG).write_bytes(content)
            try:
                return AutoConfig.from_pretrained(scratch)
            except Exception as error:  # its parsers raise errors of many classes
                why = " ".join(str(error).split())[:200]
                raise UserError(f"{where}: not a configuration of transformers ({why})") from None

    def tokenizer(self) -> TokenizerFiles | None:
        """Return the tokenizer, as transformers loads it, or None if the folder has no fast one.

        Raises:
            UserError: it cannot be loaded.
        """
        if not self.storage.exists(TOKENIZER):
            return None
        if self.storage.is_local:
            return load_tokenizer(self.storage.uri())
        with tempfile.TemporaryDirectory(prefix="elastrata-") as scratch:
            for name in self.storage.names():
                if name.endswith((".json", ".txt", ".jinja")):  # everything but the weights
                    (Path(scratch) / name).write_bytes(read_bytes(self.storage, name))
            return load_tokenizer(scratch)

    def sha256(self) -> str:
        """Return the SHA-256 of the lines that `sha256sum` prints for configuration and weights."""
        names = sorted((CONFIG, *self.weights.files))
        with ThreadPoolExecutor(_THREADS) as pool:
            sums = pool.map(self.storage.sha256, names)
            lines = [f"{digest}  {name}\n" for digest, name in zip(sums, names, strict=True)]
        return hashlib.sha256("".join(lines).encode()).hexdigest()


def find_weights_folder(place: str, revision: str | None) -> WeightsFolder:
    """Return the folder of that path or URL, or the model of that name on the hub.

    Raises:
        UserError: neither exists.
    """
    if is_on_hub(place):
        return _from_hub(place, revision)
    folder = Storage(place)
    if not folder.exists():
        raise UserError(f"{folder.uri()}: no such folder{_hint(place)}")
    _refuse_part(folder)
    return WeightsFolder(folder)


def is_on_hub(place: str) -> bool:
    """Return whether a place is a model's name on the hub rather than a path or URL."""
    # An existing folder wins over a hub model of the same name.
    return not ("://" in place or Path(place).exists() or not _HUB_NAME.fullmatch(place))


def _refuse_part(folder: Storage) -> None:
    """Check that a place is a whole folder.

    Raises:
        UserError: it is a file in one, or a checkpoint in a run's folder.
    """
    where = folder.uri()
    parent, _, name = where.rpartition("/")
    if folder.fs.isfile(folder.path()):
        raise UserError(f"{where}: a file, expected the folder that it is in, {parent}")
    run, _, section = parent.rpartition("/")
    if section == "checkpoints" and (checkpoint := FolderName.parse(name)):
        raise UserError(f"{where}: a checkpoint, expected its run, {run}@{checkpoint.step}")


def _from_hub(name: str, revision: str | None) -> WeightsFolder:
    """Return a model of the hub, downloaded if this machine's cache does not have it."""
    from huggingface_hub import snapshot_download

    failure = reach_hub(f"/api/models/{name}")
    try:
        with waiting_for(f"the model {name} of the hub"):
            path = Path(
                snapshot_download(
                    name,
                    revision=revision,
                    allow_patterns=list(_WANTED),
                    local_files_only=failure is not None,
                )
            )
    except Exception as error:  # errors of several libraries
        why = " ".join(str(failure or error).split())[:200]
        raise UserError(
            f"{name}: neither a local folder nor a model in the hub{_hint(name)} ({why})"
        ) from None
    return WeightsFolder(Storage(str(path)), hub_revision=path.name)


def _hint(name: str) -> str:
    """Return a hint at the most similar existing folder in the same parent."""
    parent = Path(name).parent
    folders = [str(path) for path in parent.iterdir() if path.is_dir()] if parent.is_dir() else []
    return suggest_nearest(name, folders)
