"""The history: what is written is read, in order, whoever wrote it; what was undone is left out."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastrata.run import history
from elastrata.run.timeline import attempts, undone_steps
from elastrata_pipelines.errors import UserError
from elastrata_pipelines.storage import Storage
from support.histories import Entry, said, started, stepped


@pytest.fixture(autouse=True)
def only_flushes_write_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Write no part because time has passed: the names of parts would depend on the machine."""
    monkeypatch.setattr(history, "PART_SECONDS", float("inf"))


@st.composite
def lives(draw: st.DrawFn) -> tuple[list[Entry], int]:
    """The entries of a run that was killed and continued a few times, and its last step."""
    entries: list[Entry] = []
    last = 0
    for attempt in range(1, draw(st.integers(1, 7)) + 1):
        start = draw(st.integers(0, last))
        entries.append(started(attempt, start))
        if start < last:
            steps = {"first": start + 1, "last": last}
            entries.append(said("rolled_back", attempt, time=0, **steps))
        last = start + draw(st.integers(0, 9))
        entries += [stepped(attempt, number) for number in range(start + 1, last + 1)]
        if draw(st.booleans()):
            entries.append(said("fault", attempt, time=0, text="killed", ranks=[0]))
    return entries, last


@given(lives())
def test_every_effective_step_is_there_once(life: tuple[list[Entry], int]) -> None:
    entries, last = life
    numbers = list(range(1, last + 1))
    assert [step["step"] for step in history.effective_steps(entries)] == numbers
    assert [step["step"] for step in history.surviving_steps(entries)] == numbers


@given(lives())
def test_every_effective_step_is_of_the_last_attempt_that_did_it(
    life: tuple[list[Entry], int],
) -> None:
    entries, _ = life
    newest = {entry["step"]: entry for entry in entries if entry["kind"] == "step"}
    for step in history.effective_steps(entries):
        assert step is newest[step["step"]]


@given(lives())
def test_a_step_counts_or_was_undone(life: tuple[list[Entry], int]) -> None:
    entries, last = life
    done = sum(entry["kind"] == "step" for entry in entries)
    groups = attempts(entries)
    assert sum(group.rolled_back for group in groups) == done - last
    assert sum(map(len, undone_steps(entries).values())) == done - last
    assert sum(len(group.steps) for group in groups) == done


def _writer(folder: Path, attempt: int = 1, writer: str = "") -> history.HistoryWriter:
    warned: list[str] = []
    return history.HistoryWriter(Storage(str(folder)), attempt, warned.append, writer)


def _step(number: int) -> Entry:
    return {key: value for key, value in stepped(1, number).items() if key not in ("kind", "time")}


def test_parts_are_read_in_order_whoever_wrote_them(tmp_path: Path) -> None:
    first, driver, second = _writer(tmp_path), _writer(tmp_path, 1, "d"), _writer(tmp_path, 2)
    driver.add("fault", {"text": "rank 1 was killed", "ranks": [1]})
    driver.flush()
    first.add("started", {"step": 0, "world_size": 2})
    first.flush()
    first.add("step", _step(1))
    first.add("step", _step(2))
    first.flush()
    second.add("started", {"step": 1, "world_size": 3})
    second.flush()
    (tmp_path / "0001-00000002.jsonl.1a2b3c4d.tmp").write_text("half a li", encoding="utf-8")
    (tmp_path / "0001-00000000 (copy).jsonl").write_text("not a part", encoding="utf-8")

    storage = Storage(str(tmp_path))
    entries = history.read_entries(storage)

    assert [(entry["kind"], entry["attempt"]) for entry in entries] == [
        ("started", 1),
        ("step", 1),
        ("step", 1),
        ("fault", 1),
        ("started", 2),
    ]
    assert history.world_sizes(entries) == [2, 3]
    assert history.next_attempt(storage) == 3
    assert [step["step"] for step in history.effective_steps(entries)] == [1]


def test_what_a_killed_writer_had_not_written_is_restored_once(tmp_path: Path) -> None:
    writer, storage = _writer(tmp_path), Storage(str(tmp_path))
    writer.add("started", {"step": 0, "world_size": 1})
    writer.flush()
    assert writer.unwritten()[1] == b""
    writer.add("step", _step(1))
    name, lines = writer.unwritten()

    assert history.restore_part(storage, name, lines)
    assert not history.restore_part(storage, name, lines), "it is there"
    assert not history.restore_part(storage, name, lines[:-9]), "its writer came further"
    assert len(history.read_entries(storage)) == 2
    assert not history.restore_part(storage, "0001-00000009.jsonl", b"")
    with pytest.raises(ValueError, match="expected the name of a part"):
        history.restore_part(storage, "../run.json", b"{}")


def test_what_a_part_lacks_goes_into_the_one_after_it(tmp_path: Path) -> None:
    writer, storage = _writer(tmp_path), Storage(str(tmp_path))
    writer.add("started", {"step": 0, "world_size": 1})
    writer.add("step", _step(1))
    name, fewer = writer.unwritten()
    writer.add("step", _step(2))
    _, lines = writer.unwritten()
    storage.write(fewer, name)  # by a thread that had begun before the second step

    assert history.restore_part(storage, name, lines)
    steps = history.effective_steps(history.read_entries(storage))
    assert [step["step"] for step in steps] == [1, 2]
    assert not history.restore_part(storage, name, lines)


def test_adding_does_not_wait_for_storage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(history, "PART_SECONDS", 0.0)
    storage, entered, opened = Storage(str(tmp_path)), threading.Event(), threading.Event()

    def slowly(self: Storage, data: bytes, *parts: str) -> None:
        entered.set()
        assert opened.wait(500)
        whole(self, data, *parts)

    whole = Storage.write
    monkeypatch.setattr(Storage, "write", slowly)
    writer = history.HistoryWriter(storage, 1, print)
    for number in range(1, 4):
        writer.add("step", _step(number))
    assert entered.wait(500)
    assert writer.unwritten()[1].count(b"\n") == 3
    opened.set()
    writer.flush()
    steps = history.effective_steps(history.read_entries(storage))
    assert [step["step"] for step in steps] == [1, 2, 3]


def test_a_part_that_cannot_be_written_is_written_later(tmp_path: Path) -> None:
    warned: list[str] = []
    folder = tmp_path / "history"
    writer = history.HistoryWriter(Storage(str(folder)), 1, warned.append)
    folder.write_text("a file where the folder should be", encoding="utf-8")
    writer.add("started", {"step": 0, "world_size": 1})
    writer.flush()
    assert "cannot write the history" in warned[0]
    assert writer.unwritten()[1]
    folder.unlink()
    writer.flush()
    assert writer.unwritten()[1] == b""
    assert history.world_sizes(history.read_entries(Storage(str(folder)))) == [1]


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ('{"kind": "step", "att', "not JSON (truncated or altered)"),
        (
            "\udcff".encode(errors="surrogateescape").decode("latin-1"),
            "not JSON (truncated or altered)",
        ),
        ("[1, 2]", "not an entry of a history (altered)"),
        ('{"attempt": 1, "time": 2}', "not an entry of a history (altered)"),
        ('{"kind": "started", "attempt": 1, "time": 2}', "'started' with a bad 'step' (altered)"),
        (
            '{"kind": "ended", "attempt": 1, "time": 2, "status": null}',
            "'ended' with a bad 'status' (altered)",
        ),
    ],
)
def test_an_altered_part_is_named(tmp_path: Path, line: str, problem: str) -> None:
    writer = _writer(tmp_path)
    writer.add("started", {"step": 0, "world_size": 1})
    writer.flush()
    part = tmp_path / "0001-00000000.jsonl"
    part.write_bytes(part.read_bytes() + line.encode("latin-1"))
    with pytest.raises(UserError) as caught:
        history.read_entries(Storage(str(tmp_path)))
    assert str(caught.value) == f"{part}, line 3: {problem}"
