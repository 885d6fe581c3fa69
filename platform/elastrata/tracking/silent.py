"""A record that keeps nothing, for runs that somebody else records."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from elastrata.tracking.tracker import Status, Tracker


class SilentTracker(Tracker):
    """Takes everything and does nothing."""

    def __init__(self) -> None:
        self.uri = self.run_id = self.experiment_id = ""

    def log_steps(self, records: Sequence[Mapping[str, float]]) -> None:
        """Does nothing, as all that follow."""

    def tag(self, tags: Mapping[str, object]) -> None: ...  # noqa: D102
    def record_checkpoint(self, uri: str, step: int, metrics: Mapping[str, float]) -> None: ...  # noqa: D102
    def forget_checkpoint(self, uri: str) -> None: ...  # noqa: D102
    def keep_checkpoints(self, uris: Collection[str]) -> None: ...  # noqa: D102
    def log_artifact(self, name: str, data: bytes, folder: str | None = None) -> None: ...  # noqa: D102
    def end(self, status: Status) -> None: ...  # noqa: D102
    def finish(self, status: Status) -> None: ...  # noqa: D102
