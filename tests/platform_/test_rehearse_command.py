"""`elastrata rehearse`, as it is typed."""

from __future__ import annotations

import json

import pytest

from elastrata.cli.main import run
from support.documented import documented_keys


def test_a_rehearsal_tells_what_the_page_says(capsys: pytest.CaptureFixture[str]) -> None:
    settings = ["workload.num_layers=2", "batch_size=32", "parallel.pipeline=2"]
    assert run(["rehearse", "gpt/125m", *settings, "--cluster", "8xH100", "--json"]) == 0
    shown = capsys.readouterr()
    result = json.loads(shown.out)
    assert list(result) == documented_keys("rehearse")
    assert [rank["rank"] for rank in result["ranks"]] == [0, 4]
    assert result["graphs"]["graphs"] > 0
    assert "the plan has" in shown.err
    assert "allgather" in shown.err


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["gpt/125m", "parallel.tensor=5"], "parallel.tensor: 5"),
        pytest.param(["gpt/125m", "--cluster", "8xCPU"], "of GPUs", marks=pytest.mark.slow),
    ],
)
def test_mistakes_get_a_line(
    arguments: list[str], line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["rehearse", *arguments]) == 2
    assert line in capsys.readouterr().err
