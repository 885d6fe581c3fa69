"""The target: the folder that a preparation fills, and what may lie there before."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from elastrata_pipelines.checked_json import Record, read_record
from elastrata_pipelines.errors import UserError
from elastrata_pipelines.format import HELD_OUT, file_problems, read_held_out
from elastrata_pipelines.format.manifest import (
    AGAIN,
    BUILDING,
    LENGTHS,
    MANIFEST,
    SHARDS,
    TOKENIZER_DIR,
    Manifest,
)
from elastrata_pipelines.hashing import text_hash
from elastrata_pipelines.preparation.provenance import PROVENANCE, Provenance
from elastrata_pipelines.preparation.tokenizer import TokenizerFiles
from elastrata_pipelines.storage import Storage

KEPT_TOKENIZER = ".trained_tokenizer.json"


class _Kept(Record):
    preparation: str
    """Fingerprint of the configuration and the source files."""
    tokenizer_json: str
    config_json: str
    checksum: int

    @property
    def hashed(self) -> int:
        return text_hash(self.preparation, self.tokenizer_json, self.config_json)


def keep_tokenizer(storage: Storage, fingerprint: str, tokenizer: TokenizerFiles) -> None:
    """Writes it down beside what a preparation is building."""
    kept = _Kept(
        preparation=fingerprint,
        tokenizer_json=tokenizer.tokenizer_json,
        config_json=tokenizer.config_json,
        checksum=0,
    )
    kept = kept.model_copy(update={"checksum": kept.hashed})
    storage.write(kept.model_dump_json().encode(), KEPT_TOKENIZER)


def kept_tokenizer(storage: Storage, fingerprint: str) -> TokenizerFiles | None:
    """That of an interrupted preparation of the same text in the same way; None where there is
    none, or not a whole one."""
    try:
        kept = read_record(_Kept, storage, KEPT_TOKENIZER)
    except (FileNotFoundError, UserError):
        return None
    if kept.preparation != fingerprint or kept.checksum != kept.hashed:
        return None
    return TokenizerFiles(kept.tokenizer_json, kept.config_json)


_OURS = (KEPT_TOKENIZER, MANIFEST, PROVENANCE, LENGTHS, TOKENIZER_DIR, SHARDS, HELD_OUT, BUILDING)
_TEMPORARY = re.compile(r"\.[0-9a-f]{8}\.tmp$")
"""What a process leaves that is killed while it writes a file."""
_AGAIN = f"bring it back, or {AGAIN}"


@dataclass(frozen=True)
class Target:
    """Where the data set goes."""

    storage: Storage

    def prepared(
        self, fingerprint: str, asked: Provenance, *, held_out: bool, overwrite: bool
    ) -> Manifest | None:
        """The data set that is there already, if it is the one to be made.

        Args:
            fingerprint: of the configuration and the files that it is made from.
            asked: the same, to tell differences by.
            held_out: whether data is to be held out of it.
            overwrite: whether it is made again whatever is there.

        Raises:
            UserError: another data set, what is left of one, or files of other origin, are there.
        """
        where = self.storage.uri()
        try:
            names = self.storage.names()
        except Exception as error:  # every store has exceptions of its own
            raise UserError(f"{where}: cannot be read ({error})") from None
        self._check_ours(names)
        if MANIFEST not in names or overwrite:
            return None
        manifest = Manifest.find(self.storage)
        if manifest is None:  # a link to nothing, which is replaced
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
        """Raise UserError for files of other origin: a data set shares its folder with nothing."""
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
        """Raises UserError where a file is missing: whoever is told to prepare again comes here."""
        parts = [(self.storage, manifest)]
        if found := read_held_out(self.storage, manifest):
            parts.append((self.storage.sub(HELD_OUT), found))
        elif held_out:
            raise UserError(f"{self.storage.uri(HELD_OUT)}: missing; {_AGAIN}")
        if problems := [problem for part in parts for problem in file_problems(*part)]:
            raise UserError(*(f"{problem}; {_AGAIN}" for problem in problems))

    def _differences(self, asked: Provenance) -> list[str]:
        """In what the data set that is there differs from the one to be made."""
        there = Provenance.read(self.storage)
        if there is None:
            return ["an earlier version made it, which did not keep its configuration"]
        return there.differences(asked)

    @contextlib.contextmanager
    def building(self) -> Iterator[Storage]:
        """A place for runs while the block lasts; a failed block leaves no half data set.

        A block that is interrupted leaves a tokenizer that is kept, one that ends or that finds a
        mistake does not.

        Raises:
            UserError: the folder cannot be written.
        """
        with self.storage.without_leftovers(), self._locked():
            yield from self._built()

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        with contextlib.ExitStack() as lock:
            try:
                is_alone = lock.enter_context(self.storage.exclusive())
            except OSError as error:
                raise UserError(f"{self.storage.uri()}: cannot be written ({error})") from None
            if not is_alone:
                raise UserError(f"{self.storage.uri()}: another command is writing there")
            yield

    def _built(self) -> Iterator[Storage]:
        try:
            self._check_ours(self.storage.names())  # again: another command may have begun there
            self.storage.delete(BUILDING)
            self.storage.write(b"", BUILDING, "begun")
        except UserError:
            raise
        except Exception as error:  # every store has exceptions of its own
            raise UserError(f"{self.storage.uri()}: cannot be written ({error})") from None
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
        """Deletes what a preparation has written, the manifest first, what it works with not."""
        for name in (MANIFEST, *sorted(set(_OURS) - {MANIFEST, BUILDING, KEPT_TOKENIZER})):
            self.storage.delete(name)
