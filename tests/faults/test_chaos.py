"""The short form of `make chaos`."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.rehearsal import problems, rehearse


@pytest.mark.matrix
@pytest.mark.timeout(900)
def test_a_run_does_not_notice_faults(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The shares of its three sources change in the second half."""
    monkeypatch.setenv("TMPDIR", "/tmp")  # so that what is set there is taken back
    report = rehearse(tmp_path, seed=7, faults=3, mixed=True)
    assert len(report.faults) >= 2
    assert problems(report, tolerance=1e-4) == []
