"""What training must know of a tokenizer, so that no worker ever loads one."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Vocabulary:
    """The sizes and special ids of the tokenizer a data set was prepared with."""

    size: int
    """Number of ids; every token is below it."""
    pad_id: int
    mask_id: int | None
    """None where the tokenizer has no mask token: such a data set cannot train BERT."""
    special_ids: tuple[int, ...]
    """Ids that are never masked nor used as random replacements (CLS, SEP, PAD, MASK, UNK...)."""
    continuation_ids: tuple[int, ...]
    """Ids that continue the word begun by the token before them (for whole-word masking)."""
