"""What tests rest on: forks that share their imports share no random numbers."""

from __future__ import annotations

from pathlib import Path

from support.forks import fork


def _draw(file: str) -> None:
    from ray._raylet import ObjectID

    Path(file).write_text(ObjectID.from_random().hex(), encoding="utf-8")


def test_forks_of_one_process_draw_ids_of_their_own(tmp_path: Path) -> None:
    files = [tmp_path / "one", tmp_path / "other"]
    for process in [fork(_draw, str(file)) for file in files]:
        process.join()
    one, other = (file.read_text(encoding="utf-8") for file in files)
    assert one != other
