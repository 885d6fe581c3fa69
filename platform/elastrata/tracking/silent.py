"""A record that keeps nothing, for runs that somebody else records."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from typing_extensions import override

from elastrata.tracking.models import LoadableModel
from elastrata.tracking.tracker import Status, Tracker


class SilentTracker(Tracker):
    """Takes everything and does nothing."""

    def __init__(self) -> None:
        self.uri = self.run_id = self.run_name = self.experiment_id = ""

    @override
    def log_steps(self, records: Sequence[Mapping[str, float]]) -> None:
        pass

    @override
    def tag(self, tags: Mapping[str, object]) -> None:
        pass

    @override
    def record_checkpoint(self, uri: str, step: int, metrics: Mapping[str, float]) -> None:
        pass

    @override
    def record_output(self, uri: str, step: int) -> None:
        pass

    @override
    def register_export(self, model: LoadableModel, name: str) -> None:
        pass

    @override
    def register_checkpoint(self, uri: str, name: str) -> None:
        pass

    @override
    def forget_checkpoint(self, uri: str) -> None:
        pass

    @override
    def keep_checkpoints(self, uris: Collection[str]) -> None:
        pass

    @override
    def log_artifact(self, name: str, data: bytes, folder: str | None = None) -> None:
        pass

    @override
    def end(self, status: Status) -> None:
        pass

    @override
    def finish(self, status: Status) -> None:
        pass
