"""What the workloads of masked language modelling share."""

from __future__ import annotations

from typing import Annotated, ClassVar

from pydantic import Field
from typing_extensions import override

from elastrata_pipelines.format import Manifest
from elastrata_workloads.unpadded.masked_lm import unmaskable
from elastrata_workloads.unpadded.masking import MaskingRule
from elastrata_workloads.unpadded.workload import UnpaddedTransformer


class MaskedTransformer(UnpaddedTransformer):
    """An unpadded transformer that predicts masked tokens."""

    predicts: ClassVar = "mlm"

    mask_probability: Annotated[float, Field(gt=0, lt=1)] = 0.15
    """Share of each sample's maskable tokens to predict; at least one token."""
    max_predictions: Annotated[int, Field(gt=0, le=2**24)] | None = None
    """Most predictions per sample; default: no limit."""
    whole_word: bool = False
    """Whether all pieces of a word are masked together."""

    @property
    def masking(self) -> MaskingRule:
        """How many tokens are masked."""
        return MaskingRule(
            probability=self.mask_probability,
            whole_word=self.whole_word,
            max_predictions=self.max_predictions,
        )

    @override
    def problems(self, manifest: Manifest) -> list[str]:
        """One line per reason why its model cannot train on that data set; empty if it can."""
        return [*unmaskable(self.name, manifest), *self.too_long(manifest)]
