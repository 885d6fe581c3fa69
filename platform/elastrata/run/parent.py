"""The parent of a run: the weights that it began with, by place and checksum."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, NonNegativeInt
from typing_extensions import override

from elastrata_pipelines.checked_json import Record


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
