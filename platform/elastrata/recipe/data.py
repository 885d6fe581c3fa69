"""The data of a phase: one prepared data set, or a mixture of several."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from elastrata.config import NAME, Config
from elastrata_pipelines.preparation import PrepareConfig

Weight = Annotated[float, Field(ge=0, le=1e9)]


class MixedSource(Config):
    """A prepared data set, and its share in the mixture."""

    name: Annotated[str, Field(pattern=NAME)]
    """Its name in records and pictures, and that of its folder."""
    path: Annotated[str, Field(min_length=1)] | None = None
    """Folder or URL of the data set. Default: the folder of its name in `data.path`."""
    weight: Weight = 1.0
    """Its share, relative to the others': 3 beside 1 is three quarters. 0: nothing of it."""
    final_weight: Weight | None = None
    """Its share at the end of the phase, relative to the others' then: shares change evenly with
    the samples. Default: `weight`."""
    max_epochs: Annotated[float, Field(gt=0, le=1e6)] | None = None
    """Most passes over it in the whole run; what happens then, `data.when_exhausted` says. Default:
    any number."""


class DataConfig(Config):
    """The data to train on."""

    path: Annotated[str, Field(min_length=1)]
    """Folder or URL of a prepared data set; `elastrata prepare` writes it. With `sources`: of the
    folder that has theirs."""
    sources: Annotated[tuple[MixedSource, ...], Field(max_length=256)] = ()
    """Several prepared data sets, mixed as they are read; all have one tokenizer. Default: the one
    data set at `path`."""
    weight_by: Literal["tokens", "samples"] = "tokens"
    """What weights are shares of. tokens: a source of longer samples gives fewer of them."""
    when_exhausted: Literal["error", "redistribute"] = "error"
    """What happens where a source would be read more than `max_epochs` times. error: the run does
    not begin. redistribute: from there on the others have its share, as they share the rest."""
    prepare: PrepareConfig | None = None
    """How `elastrata prepare` makes it. Training does not need this part."""
    window_stripes: Annotated[int, Field(gt=0, le=2**20)] = 8
    """Stripes shuffled together, of each source: more makes batches more random and reading
    costlier."""

    @model_validator(mode="after")
    def _only_with_sources(self) -> Self:
        for key in ("weight_by", "when_exhausted"):
            value = getattr(self, key)
            if not self.sources and value != type(self).model_fields[key].default:
                raise ValueError(f"{key}: {value}: only with sources")
        return self

    @property
    def places(self) -> dict[str, str]:
        """Folder or URL of each data set, by the key that names it."""
        if not self.sources:
            return {"path": self.path}
        return {
            f"sources.{number}.path": source.path or self._below(source.name)
            for number, source in enumerate(self.sources)
        }

    @property
    def title(self) -> str:
        """What it is called in a line: its folder, or the sources with their shares."""
        total = sum(self.weights)
        if not total:
            return self.path
        shares = (f"{one.name} {one.weight / total:.0%}" for one in self.sources)
        return ", ".join(shares)

    @property
    def weights(self) -> tuple[float, ...]:
        """Those of the sources at the beginning."""
        return tuple(source.weight for source in self.sources)

    @property
    def final_weights(self) -> tuple[float, ...] | None:
        """Those at the end; None: the same."""
        if all(source.final_weight is None for source in self.sources):
            return None
        return tuple(
            source.weight if source.final_weight is None else source.final_weight
            for source in self.sources
        )

    def limits(self, samples: Sequence[int]) -> tuple[int | None, ...]:
        """Most samples of each source that the run may take, where it has so many."""
        return tuple(
            None if source.max_epochs is None else int(source.max_epochs * count)
            for source, count in zip(self.sources, samples, strict=bool(self.sources))
        )

    def moved(self, places: Sequence[str]) -> DataConfig:
        """The same data, with its data sets at other places."""
        if not self.sources:
            return self.model_copy(update={"path": places[0]})
        sources = tuple(
            source.model_copy(update={"path": place})
            for source, place in zip(self.sources, places, strict=True)
        )
        return self.model_copy(update={"sources": sources})

    def _below(self, name: str) -> str:
        return f"{self.path.rstrip('/')}/{name}"
