"""Contradictions: values of a manifest that do not go with others, told in a line each."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from elastrata_pipelines.format.manifest import Manifest, Vocabulary

_UINT16_IDS = 2**16


def contradictions(manifest: Manifest, index: str) -> Iterator[str]:
    """The fields that do not go with others.

    Args:
        manifest: whose fields have the right type and range, each by itself.
        index: the path of the lengths, which must be among the files.
    """
    yield from _histogram_problems(manifest)
    yield from _file_problems(manifest, index)
    yield from _shard_problems(manifest)
    yield from _vocabulary_problems(manifest.vocabulary)
    if manifest.token_dtype == "uint16" and manifest.vocabulary.size > _UINT16_IDS:
        yield f"token_dtype: uint16: too small for the vocabulary's {manifest.vocabulary.size} ids"
    if manifest.pairs and manifest.packing != "none":
        yield f"packing: {manifest.packing}: expected none, for samples are pairs"


def _histogram_problems(manifest: Manifest) -> Iterator[str]:
    histogram = manifest.length_histogram
    samples = sum(histogram)
    tokens = sum(length * count for length, count in enumerate(histogram))
    if len(histogram) != manifest.seq_len + 1:
        yield f"length_histogram: {len(histogram)} numbers, expected {manifest.seq_len + 1}"
    if histogram[:1] != (0,):
        yield "length_histogram.0: expected 0: no sample is empty"
    if not samples:
        yield "length_histogram: expected at least one sample"
    if samples != manifest.samples:
        yield f"samples: {manifest.samples}: the length histogram counts {samples}"
    if tokens != manifest.tokens:
        yield f"tokens: {manifest.tokens}: the length histogram counts {tokens}"


def _file_problems(manifest: Manifest, index: str) -> Iterator[str]:
    seen = set[str]()
    for entry in manifest.files:
        if entry.path in seen:
            yield f"files: {entry.path}: listed twice"
        if bool(entry.samples) != bool(entry.stripes):
            yield f"files: {entry.path}: {entry.samples} samples in {entry.stripes} stripes"
        seen.add(entry.path)
    if index not in seen:
        yield f"files: {index}: missing"


def _shard_problems(manifest: Manifest) -> Iterator[str]:
    """All stripes but the last one of all are full, in every shard."""
    held, stripes = 0, sum(shard.stripes for shard in manifest.shards)
    for shard in manifest.shards:
        expected = min(shard.stripes * manifest.stripe_size, manifest.samples - held)
        if shard.samples != expected:
            yield f"files: {shard.path}: {shard.samples} samples, expected {expected}"
        held += shard.samples
    if held != manifest.samples:
        yield f"samples: {manifest.samples}, but the shards hold {held}"
    if stripes != manifest.stripes:
        yield f"stripes: {manifest.stripes}, but the shards hold {stripes}"
    if manifest.stripes != (expected := -(-manifest.samples // manifest.stripe_size)):
        yield f"stripes: {manifest.stripes}, expected {expected} of {manifest.stripe_size} samples"


def _vocabulary_problems(vocabulary: Vocabulary) -> Iterator[str]:
    masks = () if vocabulary.mask_id is None else (vocabulary.mask_id,)
    for field, ids in (
        ("pad_id", (vocabulary.pad_id,)),
        ("mask_id", masks),
        ("special_ids", vocabulary.special_ids),
        ("continuation_ids", vocabulary.continuation_ids),
    ):
        if ids and (largest := max(ids)) >= vocabulary.size:
            yield f"vocabulary.{field}: {largest}: expected ids below {vocabulary.size}, its size"
