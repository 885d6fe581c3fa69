"""Layouts of all models that are rehearsed, and the golden ledgers of their messages.

The models are small, so that each takes seconds, at 8 ranks, and at 1,024 where that makes another
mesh. A ledger is a file for each layout, so that a change of what ranks send each other is seen in
a diff. They are written anew by

    PYTHONPATH=tests python -m support.rehearsed_layouts [MODEL|LAYOUT]...
"""

from __future__ import annotations

import json
import logging
import sys
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from io import StringIO
from pathlib import Path

from elastrata.rehearsal.ledger import RankFigures
from elastrata.rehearsal.process import Request
from support.fake_cuda import apart

MODELS: Mapping[str, tuple[str, int, tuple[str, ...]]] = {
    "gpt": ("gpt/125m", 8, ("data.prepare.tokenizer.vocab_size=8192",)),
    "bert": ("bert/base", 32, ()),
    "modernbert": (
        "modernbert/base",
        16,
        ("batch_size_warmup=null", "data.prepare.tokenizer.vocab_size=8192"),
    ),
}
"""Recipe, samples of a data rank in a step, and changes."""
_SMALL = ("workload.num_layers=4", "compile=false", "precision=bf16", "micro_batch_tokens=8192")
_TENSOR = ("parallel.tensor=2",)
_PIPELINE = ("parallel.pipeline=2",)

LAYOUTS: Mapping[str, Sequence[str]] = {
    "fsdp": (),
    "selective": ("activation_checkpointing=selective",),
    "bf16-hsdp": ("parallel.reduce_dtype=bf16", "parallel.replicate=2"),
    "bucketwise": ("clip.method=bucketwise",),
    "sequence": (*_TENSOR, "parallel.sequence=true"),
    "gpipe": (*_PIPELINE, "parallel.schedule=gpipe"),
    "interleaved": (
        *_PIPELINE,
        "parallel.schedule=interleaved_1f1b",
        "parallel.virtual_stages=2",
    ),
    "zero-bubble": (
        *_PIPELINE,
        "parallel.schedule=zero_bubble",
        "parallel.reshard_after_forward=false",
    ),
    "uneven": (*_PIPELINE, "data.prepare.tokenizer.vocab_size=50_368"),
    "four-stages": ("parallel.pipeline=4", "workload.num_layers=10"),
    "all-axes": (*_TENSOR, *_PIPELINE, "parallel.replicate=2", "parallel.sequence=true"),
    "virtual": ("parallel.virtual_ranks=WORLD", "optimizer.fused=false", "workers.threads=1"),
    "muon": ("optimizer.name=muon",),
    "lamb": ("optimizer.name=lamb",),
    "sparse": ("sparsity={method: rigl, level: 0.8}",),
}
"""By name, what a recipe says. WORLD stands for the number of ranks. In `uneven` the head costs as
much as two or three blocks, so that the last stage has fewer. In `four-stages` those between the
first and the last have three blocks, those two."""
OF_EVERY_MODEL = ("fsdp", "bf16-hsdp", "sequence", "interleaved", "all-axes")
"""GPT is rehearsed in all layouts; the others in those in which their own blocks, norms, heads and
stages count. Optimizers, clipping, copies and schedules know no model: GPT stands for all."""

WIDE = ("fsdp", "bf16-hsdp", "all-axes", "virtual")
"""Of GPT's, those at 1,024 ranks."""


def layouts(model: str) -> list[str]:
    """Return the names of the layouts that a model is rehearsed in."""
    return [layout for layout in LAYOUTS if model == "gpt" or layout in OF_EVERY_MODEL]


def worlds(model: str, layout: str) -> tuple[int, ...]:
    """Return the numbers of ranks that a model's layout is rehearsed at."""
    return (8, 1024) if model == "gpt" and layout in WIDE else (8,)


def request(model: str, layout: str, world_size: int) -> Request:
    """The rehearsal of a layout."""
    recipe, samples, changes = MODELS[model]
    settings = [setting.replace("WORLD", str(world_size)) for setting in LAYOUTS[layout]]
    if set(_TENSOR) <= set(settings):
        samples //= 2  # so many ranks have them together
    # With a pipeline, twice for each data rank.
    batch = f"batch_size={samples * world_size * 2 // max(2, _stages(settings))}"
    return Request(
        recipe=recipe,
        overrides=(*changes, *_SMALL, batch, *settings),
        cluster=f"{world_size}xH100-80GB",
        graphs=False,
    )


def rehearse_layout(model: str, layout: str, world_size: int) -> list[RankFigures]:
    """The figures of its ranks, each rehearsed in a process of its own."""
    asked, stages = request(model, layout, world_size), _stages(LAYOUTS[layout])
    ranks = [world_size // stages * stage for stage in range(stages)]
    return [apart(_rehearse, asked, rank) for rank in ranks]


def _stages(settings: Sequence[str]) -> int:
    sizes = [setting for setting in settings if setting.startswith("parallel.pipeline=")]
    return int(sizes[-1].split("=")[1]) if sizes else 1


def _rehearse(asked: Request, rank: int) -> RankFigures:
    from elastrata.rehearsal.rank import rehearse_rank
    from elastrata.rehearsal.rehearse import read_task

    with _no_warnings():
        return rehearse_rank(read_task(asked), rank)


@contextmanager
def _no_warnings() -> Iterator[None]:
    """PyTorch warns of nothing, such as of a norm that is reduced in the slower of two ways."""
    log = StringIO()
    handler = logging.StreamHandler(log)
    handler.setLevel(logging.WARNING)
    # The one that DTensor's and FSDP2's loggers pass their lines to.
    logging.getLogger("torch.distributed").addHandler(handler)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield
    texts = [log.getvalue(), *(str(warning.message) for warning in caught)]
    assert not any(texts), texts


FOLDER = Path(__file__).parents[1] / "ledgers"


def ledger(figures: Iterable[RankFigures]) -> list[str]:
    """A line for each kind of message: who talks, what is sent, how often, bytes in all."""
    return [
        f"rank {rank.rank}: {one.axis} of {one.ranks}: {one.kind} {one.dtype} {one.device}: "
        f"{one.count} times, {one.bytes:,} bytes"
        for rank in figures
        for one in rank.messages
    ]


def golden(model: str, layout: str, world_size: int) -> list[str]:
    """The ledger that is kept."""
    kept: dict[str, list[str]] = json.loads(_path(model, layout).read_text(encoding="utf-8"))
    return kept[str(world_size)]


def is_kept(model: str, layout: str) -> bool:
    """Whether there is a ledger of a layout."""
    return _path(model, layout).exists()


def _path(model: str, layout: str) -> Path:
    return FOLDER / f"{model}-{layout}.json"


def _write(names: Sequence[str]) -> None:
    """Of all that are named; where no model is, or no layout, of all of these."""
    models = [name for name in names if name in MODELS] or MODELS
    named = [name for name in names if name in LAYOUTS] or LAYOUTS
    for model in models:
        for layout in (layout for layout in layouts(model) if layout in named):
            kept = {
                str(size): ledger(rehearse_layout(model, layout, size))
                for size in worlds(model, layout)
            }
            _path(model, layout).write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")
            print(_path(model, layout), flush=True)


if __name__ == "__main__":
    # By the name under which the processes of rehearsals find the function.
    from support import rehearsed_layouts

    rehearsed_layouts._write(sys.argv[1:])
