"""The kept tokenizer: trained by a preparation that was then interrupted, for the next one."""

from __future__ import annotations

from elastrata_pipelines.checked_json import Record, read_record
from elastrata_pipelines.errors import UserError
from elastrata_pipelines.hashing import text_hash
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
