"""Preparation: turns text into a data set."""

from elastrata_pipelines.preparation.build import prepare
from elastrata_pipelines.preparation.config import PrepareConfig, SourceConfig, TokenizerConfig

__all__ = ["PrepareConfig", "SourceConfig", "TokenizerConfig", "prepare"]
