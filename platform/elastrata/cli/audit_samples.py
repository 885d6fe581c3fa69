"""`elastrata audit RUN --step K --samples`: a step's samples, and their way back to the text."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from elastrata.terminal.console import open_console, print_json_line
from elastrata_pipelines.errors import UserError

if TYPE_CHECKING:
    from elastrata.run.step_samples import StepSample


def list_samples(
    run: str,
    step: int | None,
    text: Sequence[str],
    *,
    is_asked: bool,
    other: str | None,
    json: bool,
) -> None:
    """Prints the samples of a step.

    Raises:
        UserError: options that do not go together, or what `step_samples` has to say.
    """
    from elastrata.run.claim import named_run
    from elastrata.run.step_samples import step_samples

    if not is_asked or step is None:
        given = "--samples" if is_asked else "--step" if step is not None else "--text"
        missing = "--step K" if is_asked else "--samples"
        raise UserError(f"{given}: expected with {missing}")
    if other is not None:
        raise UserError(f"{other}: unexpected: --samples is about one run")
    found = step_samples(named_run(run), step, _paths(text))
    console = open_console(as_json=json)
    for line in _lines(found):
        console.print(line, markup=False, highlight=False, soft_wrap=True)
    if json:
        print_json_line({"step": step, "samples": [sample.to_dict() for sample in found]})


def _paths(given: Iterable[str]) -> dict[str, list[str]]:
    """The paths of the text, by source; those without a source are of all."""
    from elastrata.run.step_samples import ANY

    paths = dict[str, list[str]]()
    for one in given:
        name, equals, path = one.partition("=")
        paths.setdefault(name if equals else ANY, []).append(path if equals else one)
    return paths


def _lines(samples: Sequence[StepSample]) -> Iterable[str]:
    data_set = None
    for sample in samples:
        if sample.data_set != data_set:
            data_set = sample.data_set
            yield f"{data_set}"
        place = f"  {sample.id}  {sample.tokens:>6,} tokens  {sample.shard}, row {sample.row:,}"
        yield f"{place}, epoch {sample.epoch}"
        if origin := sample.origin:
            token = "" if origin.token is None else f", from token {origin.token:,}"
            copy = f", copy {origin.copy}" if origin.copy else ""
            yield f"    {origin.source}: {origin.file}:{origin.line}{token}{copy}"
            yield f"    {origin.text}"
