"""The data set of a recipe, or of one of its phases."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from elastrata.config import Config
from elastrata_pipelines.preparation import PrepareConfig


class DataConfig(Config):
    """The data set to train on."""

    path: Annotated[str, Field(min_length=1)]
    """Folder or URL of a prepared data set; `elastrata prepare` writes it."""
    prepare: PrepareConfig | None = None
    """How `elastrata prepare` makes it. Training does not need this part."""
    window_stripes: Annotated[int, Field(gt=0, le=2**20)] = 8
    """Stripes shuffled together: more makes batches more random and reading costlier."""
