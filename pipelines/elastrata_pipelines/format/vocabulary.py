"""What training must know of a tokenizer, so that no worker ever loads one."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from elastrata_pipelines.checked_json import Record

TokenId = Annotated[int, Field(ge=0, lt=2**32)]
"""An id; that it is one of the vocabulary is for the manifest to say (`contradictions`)."""


class Vocabulary(Record):
    """The sizes and special ids of the tokenizer a data set was prepared with."""

    size: Annotated[int, Field(ge=1, le=2**32)]
    """Number of ids; every token is below it."""
    pad_id: TokenId
    mask_id: TokenId | None
    """None where the tokenizer has no mask token: such a data set cannot train BERT."""
    special_ids: tuple[TokenId, ...]
    """Ids that are never masked nor used as random replacements (CLS, SEP, PAD, MASK, UNK...)."""
    continuation_ids: tuple[TokenId, ...]
    """Ids that continue the word begun by the token before them (for whole-word masking)."""
