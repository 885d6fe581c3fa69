"""Layouts of all models that are rehearsed: small, so that each takes seconds, at 8 ranks, and at
1,024 where that makes another mesh."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from elastrata.rehearsal.figures import RankFigures
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
_FOUR_STAGES = ("parallel.pipeline=4", "workload.num_layers=10")
_STABLE = ("workload.qk_norm=true", "workload.z_loss=1e-4")

LAYOUTS: Mapping[str, Sequence[str]] = {
    "fsdp": (),
    "hsdp": ("parallel.replicate=2",),
    "copies": ("parallel.replicate=all",),
    "keep": ("parallel.reshard_after_forward=false",),
    "prefetch": ("parallel.prefetch=2",),
    "selective": ("activation_checkpointing=selective",),
    "full": ("activation_checkpointing=full",),
    "bf16": ("parallel.reduce_dtype=bf16",),
    "bf16-hsdp": ("parallel.reduce_dtype=bf16", "parallel.replicate=2"),
    "bucketwise": ("clip.method=bucketwise",),
    "bucketwise-local": ("clip.method=bucketwise", "clip.scope=local"),
    "tensor": _TENSOR,
    "sequence": (*_TENSOR, "parallel.sequence=true"),
    "tensor-full": (*_TENSOR, "activation_checkpointing=full"),
    "gpipe": (*_PIPELINE, "parallel.schedule=gpipe"),
    "1f1b": _PIPELINE,
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
    "four-stages": _FOUR_STAGES,
    "four-stages-full": (*_FOUR_STAGES, "workload.num_layers=20", "activation_checkpointing=full"),
    "all-axes": (*_TENSOR, *_PIPELINE, "parallel.replicate=2", "parallel.sequence=true"),
    "virtual": ("parallel.virtual_ranks=WORLD", "optimizer.fused=false", "workers.threads=1"),
    "muon": ("optimizer.name=muon",),
    "lamb": ("optimizer.name=lamb",),
    "sparse": ("sparsity={method: rigl, level: 0.8}",),
    "averaged": ("average={decay: 0.999}",),
    "stable": _STABLE,
    "stable-all-axes": (*_STABLE, *_TENSOR, *_PIPELINE, "parallel.sequence=true"),
}
"""By name, what a recipe says. WORLD stands for the number of ranks. In `uneven` the head costs as
much as two or three blocks, so that the last stage has fewer. In `four-stages` those between the
first and the last have three blocks, those two; in the other one all have five."""
OF_EVERY_MODEL = ("fsdp", "bf16-hsdp", "selective", "sequence", "interleaved", "sparse", "all-axes")
"""GPT is rehearsed in all layouts; the others in those in which their own blocks, norms, heads and
stages count. Optimizers, clipping, copies and schedules know no model: GPT stands for all."""

WIDE = ("fsdp", "hsdp", "bf16-hsdp", "bucketwise", "all-axes", "virtual")
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
    from elastrata.rehearsal.rehearse import task

    return rehearse_rank(task(asked), rank)
