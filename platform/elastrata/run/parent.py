"""The parent of a run, by place and checksum: the weights that it began with, or the run whose
checkpoint it goes on from."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Literal

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


class Parent(Record):
    """The weights that a run began with, as `run.json` names them."""

    kind: Literal["run", "folder", "hub"]
    """A checkpoint of another run, a folder that transformers could load, or a model of the hub."""
    url: Annotated[str, Field(min_length=1, max_length=10_000)]
    """The run's folder, or that of the weights; absolute. hub: the model's name."""
    sha256: Annotated[str, Field(pattern="^[0-9a-f]{64}$")]
    """run: of the checkpoint's marker, which holds the checksums of its files. Else: of the lines
    that `sha256sum` prints for config.json and the safetensors files, sorted by name."""
    num_ids: NonNegativeInt
    """Ids that it knows; rows of later ones are drawn."""
    commit: str | None = None
    """run: the name of the checkpoint. hub: the revision."""
    step: NonNegativeInt | None = None
    """run: its optimizer steps..."""
    samples: NonNegativeInt | None = None
    """... and samples."""
    optimizer: bool = False
    """Whether the optimizer's state comes from there, too."""

    @override
    def __str__(self) -> str:
        step = "" if self.step is None else f", step {self.step}"
        return f"{self.url}{step} (SHA-256 {self.sha256[:12]})"

    def to_tags(self) -> dict[str, str]:
        """The tags of a run's record."""
        tags = {"parent": self.url, "parent.sha256": self.sha256}
        return tags if self.step is None else {**tags, "parent.step": str(self.step)}
