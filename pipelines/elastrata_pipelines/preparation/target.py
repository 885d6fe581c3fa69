"""Targets: the folder that a preparation fills, and checks of its previous content."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from elastrata_pipelines.checked_json import Record, describe_error, read_record
from elastrata_pipelines.errors import UserError
from elastrata_pipelines.format import HELD_OUT, file_problems, read_held_out
from elastrata_pipelines.format.manifest import (
    BUILDING,
    LENGTHS,
    MANIFEST,
    PREPARE_AGAIN_ADVICE,
    SHARDS,
    TOKENIZER_DIR,
    Manifest,
)
from elastrata_pipelines.hashing import text_hash
from elastrata_pipelines.preparation.provenance import PROVENANCE, Provenance
from elastrata_pipelines.preparation.tokenizer import TokenizerFiles
from elastrata_pipelines.storage import Storage

KEPT_TOKENIZER = ".trained_tokenizer.json"


class _KeptTokenizer(Record):
    preparation: str
    """Fingerprint of the configuration and the source files."""
    tokenizer_json: str
    config_json: str
    checksum: int

    @property
    def computed_checksum(self) -> int:
        return text_hash(self.preparation, self.tokenizer_json, self.config_json)


def keep_tokenizer(storage: Storage, fingerprint: str, tokenizer: TokenizerFiles) -> None:
    """Write a trained tokenizer to the data set's folder."""
    record = _KeptTokenizer(
        preparation=fingerprint,
        tokenizer_json=tokenizer.tokenizer_json,
        config_json=tokenizer.config_json,
        checksum=0,
    )
    record = record.model_copy(update={"checksum": record.computed_checksum})
    storage.write(record.model_dump_json().encode(), KEPT_TOKENIZER)


def load_kept_tokenizer(storage: Storage, fingerprint: str) -> TokenizerFiles | None:
    """Return the tokenizer that an interrupted preparation of the same text and settings left.

    Return None if it does not exist or is damaged.
    """
    try:
        record = read_record(_KeptTokenizer, storage, KEPT_TOKENIZER)
    except (FileNotFoundError, UserError):
        return None
    if record.preparation != fingerprint or record.checksum != record.computed_checksum:
        return None
    return TokenizerFiles(record.tokenizer_json, record.config_json)


_OURS = (KEPT_TOKENIZER, MANIFEST, PROVENANCE, LENGTHS, TOKENIZER_DIR, SHARDS, HELD_OUT, BUILDING)
_TEMPORARY = re.compile(r"\.[0-9a-f]{8}\.tmp$")
"""Ending of the files that remain if a process is killed while writing."""
_AGAIN = f"bring it back, or {PREPARE_AGAIN_ADVICE}"


@dataclass(frozen=True)
class Target:
    """Folder of the data set."""

    storage: Storage

    def prepared(
        self, fingerprint: str, asked: Provenance, *, held_out: bool, overwrite: bool
    ) -> Manifest | None:
        """Return the existing data set if it is the one to be made; else None.

        Args:
            fingerprint: fingerprint of the configuration and the files.
            asked: the same values, to list the differences.
            held_out: whether data is to be held out.
            overwrite: whether existing data is replaced.

        Raises:
            UserError: the folder contains another data set, an incomplete one, or other files.
        """
        where = self.storage.uri()
        try:
            names = self.storage.names()
        # Every store raises errors of other classes.
        except Exception as error:
            raise UserError(f"{where}: cannot be read ({describe_error(error)})") from None
        self._check_ours(names)
        if MANIFEST not in names or overwrite:
            return None
        manifest = Manifest.find(self.storage)
        # A broken link, which will be replaced.
        if manifest is None:
            return None
        if manifest.preparation != fingerprint:
            raise UserError(
                f"{where}: holds a data set made with another configuration or from other files; "
                "choose another folder, or replace it with --overwrite",
                *(f"{where}: {line}" for line in self._differences(asked)),
            )
        self._check_whole(manifest, held_out=held_out)
        return manifest

    def _check_ours(self, names: Sequence[str]) -> None:
        """Raise UserError if the folder contains other files."""
        # `clear` deletes only its own files, and a data set shares its folder with nothing else.
        foreign = [name for name in names if _TEMPORARY.sub("", name) not in _OURS]
        if foreign:
            some = ", ".join(foreign[:3]) + (", ..." if len(foreign) > 3 else "")
            raise UserError(
                f"{self.storage.uri()}: holds other files ({some}); choose an empty or new folder"
            )
        parent = Storage(self.storage.uri().rpartition("/")[0])
        if parent.exists(MANIFEST) and parent.exists(SHARDS):
            raise UserError(
                f"{self.storage.uri()}: is inside the data set {parent.uri()}; choose another "
                "folder"
            )

    def _check_whole(self, manifest: Manifest, *, held_out: bool) -> None:
        """Raise UserError if a file is missing."""
        # Users whose data set is damaged are advised to prepare it again, so an existing manifest
        # is no proof that the files exist.
        parts = [(self.storage, manifest)]
        if found := read_held_out(self.storage, manifest):
            parts.append((self.storage.sub(HELD_OUT), found))
        elif held_out:
            raise UserError(f"{self.storage.uri(HELD_OUT)}: missing; {_AGAIN}")
        if problems := [problem for part in parts for problem in file_problems(*part)]:
            raise UserError(*(f"{problem}; {_AGAIN}" for problem in problems))

    def _differences(self, requested: Provenance) -> list[str]:
        """Return the differences between the existing data set and the one to be made."""
        existing = Provenance.read(self.storage)
        if existing is None:
            return ["an earlier version made it, which did not keep its configuration"]
        return existing.differences(requested)

    @contextlib.contextmanager
    def building(self) -> Iterator[Storage]:
        """Provide a folder for runs during the block; a failed block leaves no partial data set.

        A trained tokenizer remains if the block is interrupted, but not if it ends or raises a
        UserError.

        Raises:
            UserError: the folder cannot be written.
        """
        with self.storage.removing_empty_folders(), self._lock():
            yield from self._build_folder()

    @contextlib.contextmanager
    def _lock(self) -> Iterator[None]:
        with contextlib.ExitStack() as lock:
            try:
                is_alone = lock.enter_context(self.storage.hold_lock())
            except OSError as error:
                reason = describe_error(error)
                raise UserError(f"{self.storage.uri()}: cannot be written ({reason})") from None
            if not is_alone:
                raise UserError(f"{self.storage.uri()}: another command is writing there")
            yield

    def _build_folder(self) -> Iterator[Storage]:
        try:
            # Again, since another command may have started there before the lock was taken.
            self._check_ours(self.storage.names())
            self.storage.delete(BUILDING)
            self.storage.write(b"", BUILDING, "begun")
        except UserError:
            raise
        # Every store raises errors of other classes.
        except Exception as error:
            reason = describe_error(error)
            raise UserError(f"{self.storage.uri()}: cannot be written ({reason})") from None
        try:
            yield self.storage.sub(BUILDING)
            self.storage.delete(KEPT_TOKENIZER)
        except BaseException as error:
            if isinstance(error, UserError):
                self.storage.delete(KEPT_TOKENIZER)
            if not self.storage.exists(MANIFEST):
                self.clear()
            raise
        finally:
            self.storage.delete(BUILDING)

    def clear(self) -> None:
        """Delete everything that a preparation has written, except its intermediate files."""
        # The manifest first: without it, a partly deleted folder is no data set.
        for name in (MANIFEST, *sorted(set(_OURS) - {MANIFEST, BUILDING, KEPT_TOKENIZER})):
            self.storage.delete(name)
