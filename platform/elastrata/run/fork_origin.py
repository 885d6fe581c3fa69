"""The origin of a fork: the checkpoint of another run that it goes on from."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated

from pydantic import Field, NonNegativeInt
from typing_extensions import override

from elastrata_pipelines.checked_json import Record
from elastrata_pipelines.phase import Key, Origin


class ForkOrigin(Record):
    """The place in another run, its parent, that a run goes on from."""

    url: Annotated[str, Field(min_length=1, max_length=10_000)]
    """The parent's folder; absolute."""
    commit: Annotated[str, Field(pattern=r"^[0-9]{9}-[0-9]{4,9}-[0-9a-f]{6}$")]
    """The name of the checkpoint there."""
    sha256: Annotated[str, Field(pattern="^[0-9a-f]{64}$")]
    """Of the checkpoint's marker, which holds the checksums of its files."""
    step: NonNegativeInt
    """Steps done in it."""
    samples: NonNegativeInt
    """Samples seen."""
    tokens: NonNegativeInt
    """Tokens seen."""
    positions: dict[str, NonNegativeInt]
    """Samples taken by then of each data set that the fork reads on in the same order, by the data
    set's fingerprint; of others it begins with the first."""

    @override
    def __str__(self) -> str:
        return f"{self.url}, step {self.step} (SHA-256 {self.sha256[:12]})"

    def placed(self, data: Mapping[Key, str]) -> Origin[Key]:
        """The place that phases are reckoned from.

        Args:
            data: the fingerprint of each data set, by what it is called.
        """
        known = {key: self.positions.get(value, 0) for key, value in data.items()}
        return Origin(step=self.step, samples=self.samples, positions=known)

    def to_tags(self) -> dict[str, str]:
        """The tags of a run's record."""
        return {"parent": self.url, "parent.step": str(self.step), "parent.sha256": self.sha256}
