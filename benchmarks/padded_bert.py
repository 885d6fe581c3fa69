"""BERT as most code trains it: samples padded to one length, dense attention with a mask.

`dense_attention` is the same function of unpadded tokens as ours, to check it against; `PaddedBert`
is the same model over padded samples, to measure it beside ours.

G: samples; L: the padded length; T: tokens; H: heads; D: size of a head.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

import elastrata_workloads.unpadded.attention as self_attention
from elastrata.bench.samples import read_histogram
from elastrata.recipe.recipe import Recipe
from elastrata_pipelines.format import Vocabulary
from elastrata_pipelines.rows import Rows
from elastrata_workloads.bert import Bert
from elastrata_workloads.bert.objective import BertBatch
from elastrata_workloads.unpadded.batch import Segments
from elastrata_workloads.unpadded.shapes import Kernel

Attention = Callable[..., Tensor]
"""As `elastrata_workloads.unpadded.attention`; these two know one kernel, and no
windows."""


@contextmanager
def attention_by(form: Attention) -> Iterator[None]:
    """Models made or run in its block attend by `form`."""
    ours = self_attention.attention
    self_attention.attention = form
    try:
        yield
    finally:
        self_attention.attention = ours


def dense_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    segments: Segments,
    kernel: Kernel = "auto",
    **_: object,
) -> Tensor:
    """Pads [T, H, D] to [G, H, L, D], attends with a mask, and takes the padding out again."""
    longest = max(segments.lengths)
    mask = length_mask(segments.lengths, longest).to(query.device)
    places = mask.flatten().nonzero().squeeze(1)
    q, k, v = (_padded(x, places, (len(mask), longest)) for x in (query, key, value))
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask[:, None, None, :])
    return out.transpose(1, 2).flatten(0, 1).index_select(0, places)


def length_mask(lengths: tuple[int, ...], longest: int) -> Tensor:
    """Shape [G, L]: where tokens are real."""
    return torch.arange(longest) < torch.tensor(lengths)[:, None]


def _padded(x: Tensor, places: Tensor, shape: tuple[int, int]) -> Tensor:
    flat = x.new_zeros(shape[0] * shape[1], *x.shape[1:]).index_copy(0, places, x)
    return flat.unflatten(0, shape).transpose(1, 2)


@dataclass(frozen=True, eq=False)
class PaddedSegments(Segments):
    """Samples that all have L positions."""

    mask: Tensor
    """Shape [G, 1, 1, L]: where tokens are real."""


def padded_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    segments: PaddedSegments,
    kernel: Kernel = "auto",
    **_: object,
) -> Tensor:
    """Over tokens that are padded already: one dense call."""
    shape = (segments.mask.shape[0], segments.mask.shape[3])
    q, k, v = (x.unflatten(0, shape).transpose(1, 2) for x in (query, key, value))
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=segments.mask)
    return out.transpose(1, 2).flatten(0, 1)


@dataclass(frozen=True, kw_only=True)
class PaddedBatch(BertBatch):
    """A micro-batch whose samples are padded to L positions."""

    mask: Tensor
    """Shape [G, 1, 1, L]: where tokens are real."""

    @property
    def segments(self) -> PaddedSegments:
        length = self.segment_lengths[0]
        return PaddedSegments(self.offsets, self.segment_lengths, longest=length, mask=self.mask)


class PaddedBert(Bert):
    """BERT over samples padded to `max_positions`; its models need `padded_attention`."""

    def collate(self, rows: Rows, vocabulary: Vocabulary, seed: int) -> PaddedBatch:
        return pad(super().collate(rows, vocabulary, seed), self.max_positions, vocabulary.pad_id)


def pad(batch: BertBatch, length: int, pad_id: int) -> PaddedBatch:
    """A batch with equal samples and predictions, every sample with `length` positions. For masked
    language modelling alone, without dropout."""
    mask = length_mask(batch.segment_lengths, length)
    samples = len(mask)
    places = mask.flatten().nonzero().squeeze(1)
    padding = torch.full((samples * length,), pad_id)
    return PaddedBatch(
        weights=batch.weights,
        num_positions=samples * length,
        input_ids=padding.index_copy(0, places, batch.input_ids),
        positions=torch.arange(length).repeat(samples),
        token_types=None,
        offsets=torch.arange(samples + 1, dtype=torch.int32) * length,
        segment_lengths=(length,) * samples,
        predicted=places[batch.predicted],
        targets=batch.targets,
        sample_starts=None,
        not_next=None,
        dropout_keys=None,
        mask=mask[:, None, None, :],
    )


def padded_recipe(recipe: Recipe, histogram: str) -> Recipe:
    """A recipe with padded samples, and micro-batches of as many positions."""
    counts = read_histogram(histogram)
    mean = sum(length * count for length, count in enumerate(counts)) / sum(counts)
    length = recipe.workload.max_positions
    budget = max(length, round(recipe.micro_batch_tokens * mean / length))
    workload = PaddedBert(**recipe.workload.model_dump())
    return recipe.model_copy(update={"workload": workload, "micro_batch_tokens": budget})
