"""The cases of `gpu.py`: correctness, speed and memory of models on a GPU.

A case is a function that runs in its own process and returns a row. In addition to its own
arguments it takes those that `gpu.py` passes to every case (`CaseOptions`). `is_right` in a result
says whether the computed values are correct.
"""

from __future__ import annotations

import platform
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from gpu import Row
from gpu_kernels import (
    PaddedBert,
    attention_by,
    check,
    failures,
    padded_attention,
    padded_recipe,
    products,
    profiled_clip,
    relative,
)
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from elastrata.bench.samples import Samples, bench_samples
from elastrata.bench.step import MFU_CONVENTION, measure_steps
from elastrata.checkpoints.commit import list_commits
from elastrata.checkpoints.save import DurableSaver
from elastrata.checkpoints.state import restore, training_state
from elastrata.device.capabilities import current_device, device_name, peak_flops
from elastrata.optim.optimizer import build_optimizer
from elastrata.parallel.mesh import lone_group
from elastrata.planner.choice import group_cluster, group_layout, phase_choices
from elastrata.recipe.file import load_recipe
from elastrata.recipe.recipe import Recipe
from elastrata.step.records import StepRecord
from elastrata.trainer.build_model import DividedModel, build_divided_model
from elastrata.trainer.trainer import Loop, build_loop
from elastrata.workload.workload import model_spec
from elastrata_pipelines.batches import Start
from elastrata_pipelines.storage import Storage
from elastrata_workloads.unpadded.attention import attention
from elastrata_workloads.unpadded.batch import Segments

NATURAL = "natural"
_TINY = ("workload.hidden_size=64", "workload.num_layers=2", "workers.threads=1")
TINY = {
    "gpt": (
        *_TINY,
        *("workload.num_heads=2", "workload.max_positions=128", "data.prepare.seq_len=128"),
        *("data.prepare.tokenizer.vocab_size=1000", "workload.embedding_multiple=1"),
        *("workload.attention=dense", "batch_size=2", "micro_batch_tokens=128"),
    ),
    "bert": (
        *_TINY,
        *("workload.num_heads=2", "data.prepare.tokenizer.vocab_size=1000"),
        *("workload.embedding_multiple=1", "batch_size=4", "micro_batch_tokens=1024"),
    ),
}
"""Overrides that make a model tiny."""


@dataclass(frozen=True, kw_only=True)
class Told:
    """Arguments that `gpu.py` passes to every case.

    Raises:
        RuntimeError: the device is unavailable.
    """

    device: str
    is_tiny: bool
    histogram: str
    folder: str

    def __post_init__(self) -> None:
        found_device = current_device().type
        if found_device != ("cpu" if self.device == "cpu" else "cuda"):
            raise RuntimeError(f"wanted {self.device}, found {found_device}")

    @property
    def is_measured(self) -> bool:
        """Whether the figures are meaningful."""
        return not self.is_tiny and self.device != "fake"

    def recipe(self, model: str, overrides: Sequence[str] = ()) -> Recipe:
        """Return a recipe, of a tiny model if `is_tiny`; compiled on a GPU only."""
        # Compilation takes minutes on a CPU, and is not under test there.
        last_overrides = () if self.device == "cuda" else ("compile=false",)
        tiny = TINY[model.partition("/")[0]] if self.is_tiny else ()
        precision = "precision=fp32" if self.device == "cpu" else "precision=bf16"
        kept_overrides = [one for one in overrides if not (self.is_tiny and _is_of_size(one))]
        return load_recipe(model, [precision, *tiny, *kept_overrides, *last_overrides])

    def lengths(self, wanted: str) -> str:
        """Return the lengths in the form that `bench_samples` accepts."""
        return self.histogram if wanted == NATURAL else wanted


def _is_of_size(override: str) -> bool:
    return override.partition("=")[0] in ("batch_size", "micro_batch_tokens", "workload.num_layers")


@contextmanager
def _threads(recipe: Recipe) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(recipe.workers.threads or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def records(recipe: Recipe, samples: Samples, device: torch.device) -> list[StepRecord]:
    """Return the records of the engine's own steps on a device."""
    with lone_group(device), _threads(recipe):
        return list(steps_after(*engine(recipe, samples, device), samples, 0))


def engine(
    recipe: Recipe, samples: Samples, device: torch.device
) -> tuple[DividedModel, torch.optim.Optimizer, Loop]:
    # A fixed length: the recipe's real data set is not there to derive one from.
    endless = recipe.model_copy(update={"steps": 1000, "epochs": None, "tokens": None})
    divided = build_divided_model(endless, samples.vocabulary, samples.seq_len, device, 1)
    blocks = recipe.workload.blocks(divided.model)
    optimizer = build_optimizer(recipe.optimizer, divided.model, blocks)
    return divided, optimizer, build_loop(endless, divided.clip, samples.vocabulary, device, 1)


def steps_after(
    divided: DividedModel,
    optimizer: torch.optim.Optimizer,
    loop: Loop,
    samples: Samples,
    done: int,
) -> Iterator[StepRecord]:
    """Return an iterator over the steps after the first `done` ones."""
    run = loop.run(divided.forward_backward, optimizer, samples.steps[done:], Start())
    return (record for record, _ in run)


def tensors(divided: DividedModel, optimizer: torch.optim.Optimizer) -> Iterator[Tensor]:
    """Yield every tensor of a training state, this rank's part."""
    state = training_state(divided.model, optimizer)
    for part in sorted(state):
        for name in sorted(state[part]):
            if isinstance(value := state[part][name], Tensor):
                # `_local_tensor` is this rank's shard of a DTensor.
                yield getattr(value, "_local_tensor", value).detach()


CPU = torch.device("cpu")
SMALL = ("workload.num_layers=4", "batch_size=8", "micro_batch_tokens=8192")
"""Overrides of `gpt/125m` for checks."""
# Overrides without approximations, for comparisons in fp32.
EXACT = ("precision=fp32", "compile=false", "workload.attention=dense", "optimizer.fused=false")
HEADS = {"bert": (16, 16, False), "gpt": (12, 12, True), "llama": (16, 4, True)}
"""Query heads, key and value heads, and whether attention is causal."""
# Around powers of two, equal neighbours and a single token: the edge cases of varlen kernels.
LENGTHS = (512, 511, 300, 300, 128, 65, 64, 63, 7, 1)
ATTENTION_BF16, LOSS_BF16 = 1e-2, 2e-3
"""Tolerated relative differences in bf16."""
# Optimizers that divide by a square root amplify rounding errors.
LOSS_FP32 = 1e-3
"""Tolerated relative difference after several steps."""
# A GPU may add up sums in another order each time.
RESTORED = 1e-5
"""Tolerated relative difference of the loss after a restart."""


def attention_beside_dense(**options: Any) -> Row:
    """Compare unpadded attention in bf16 with dense attention in fp32: results and gradients."""
    Told(**options)
    differences = {name: _attention_difference(*shape) for name, shape in HEADS.items()}
    return _compare_with_tolerance(differences, ATTENTION_BF16)


def _attention_difference(heads: int, kv_heads: int, causal: bool) -> float:
    device = current_device()
    torch.manual_seed(0)
    tokens, size = sum(LENGTHS), 64
    shapes = [(tokens, number, size) for number in (heads, kv_heads, kv_heads, heads)]
    query, key, value, gradient = (torch.randn(shape, device=device) for shape in shapes)
    ends = torch.tensor((0, *LENGTHS)).cumsum(0).to(device, torch.int32)
    segments = Segments(ends, LENGTHS, max(LENGTHS))

    def results(dtype: torch.dtype, kernel: Any) -> list[Tensor]:
        leaves = [x.to(dtype).requires_grad_() for x in (query, key, value)]
        out = attention(*leaves, segments, kernel, causal=causal)
        gradients = torch.autograd.grad(out, leaves, gradient.to(dtype))
        return [x.float() for x in (out, *gradients)]

    pairs = zip(results(torch.bfloat16, "auto"), results(torch.float32, "dense"), strict=True)
    return max(relative([ours], [exact]) for ours, exact in pairs)


def steps_beside_cpu(**options: Any) -> Row:
    """Compare losses and gradient norms of some steps on this device with those on the CPU.

    In fp32, for each clipping method.
    """
    Told(**options)
    differences: dict[str, float] = {}
    for model in ("gpt/125m", "bert/base"):
        for clip in ("none", "global_norm", "bucketwise"):
            tiny = TINY[model.partition("/")[0]]
            recipe = load_recipe(model, [*tiny, f"clip.method={clip}", *EXACT])
            samples = bench_samples(recipe, "full", steps=4)
            on_device, on_cpu = (records(recipe, samples, on) for on in (current_device(), CPU))
            for what in ("loss", "gradient_norm"):
                differences[f"{model}, {clip}, {what}"] = max(
                    abs(getattr(one, what) / getattr(other, what) - 1)
                    for one, other in zip(on_device, on_cpu, strict=True)
                )
    return _compare_with_tolerance(differences, LOSS_FP32)


def ways_agree(**options: Any) -> Row:
    """Compare the bf16 loss after some steps with that of fp32 and dense attention.

    With and without compilation, for each mode of activation checkpointing.
    """
    case = Told(**options)
    sizes = () if case.is_tiny else SMALL
    exact = case.recipe("gpt/125m", [*sizes, *EXACT])
    samples = bench_samples(exact, "full", steps=3)
    expected = records(exact, samples, current_device())[-1].loss
    differences = {}
    for compiled in ("true", "false"):
        for way in ("none", "selective", "full"):
            overrides = [*sizes, f"compile={compiled}", f"activation_checkpointing={way}"]
            recipe = case.recipe("gpt/125m", overrides)
            loss = records(recipe, samples, current_device())[-1].loss
            differences[f"compile {compiled}, {way}"] = abs(loss / expected - 1)
    return _compare_with_tolerance(differences, LOSS_BF16)


def saved_and_loaded(**options: Any) -> Row:
    """Compare a run that is saved after two steps with one that resumes from there.

    The state must be equal bit by bit, and the losses of later steps within `RESTORED`.
    """
    case = Told(**options)
    recipe = case.recipe("gpt/125m", [*(() if case.is_tiny else SMALL), *EXACT])
    samples = bench_samples(recipe, "full", steps=4)
    problems: list[str] = []
    with tempfile.TemporaryDirectory() as folder, lone_group(current_device()):
        storage = Storage(folder)
        divided, optimizer, loop = engine(recipe, samples, current_device())
        run = steps_after(divided, optimizer, loop, samples, 0)
        _, second = next(run), next(run)
        saver = DurableSaver(storage, keep_last=1, keep_best=False, warn=problems.append)
        saver.save(
            training_state(divided.model, optimizer),
            step=2,
            samples=second.samples,
            tokens=second.tokens,
        )
        # Copied, as the run continues to train these tensors.
        saved_tensors = [tensor.clone() for tensor in tensors(divided, optimizer)]
        saver.wait()
        saver.close()
        # The remaining steps of the first run, without a restart.
        continued_losses = [record.loss for record in run]
        divided, optimizer, loop = engine(recipe, samples, current_device())
        restore(storage, list_commits(storage)[0], divided.model, optimizer)
        pairs = zip(tensors(divided, optimizer), saved_tensors, strict=True)
        is_equal = all(torch.equal(ours, theirs) for ours, theirs in pairs)
        resumed_losses = [
            record.loss for record in steps_after(divided, optimizer, loop, samples, 2)
        ]
    differences = {
        f"loss of step {step}": abs(one / other - 1)
        for step, one, other in zip((3, 4), resumed_losses, continued_losses, strict=True)
    }
    row = _compare_with_tolerance(differences, RESTORED)
    return {**row, "state_is_equal": is_equal, "problems": problems} | {
        "is_right": row["is_right"] and is_equal and not problems
    }


def streams(**options: Any) -> Row:
    """Run some steps under PyTorch's CUDA stream sanitizer.

    The sanitizer raises if a kernel may read memory that another stream still writes.
    """
    case = Told(**options)
    overrides = ["workload.num_layers=4", "batch_size=4", "micro_batch_tokens=4096"]
    recipe = case.recipe("gpt/125m", [*overrides, "compile=false"])
    samples = bench_samples(recipe, "full", steps=3)
    return {"loss": records(recipe, samples, current_device())[-1].loss}


def bert_agrees(*, model: str, lengths: str, **options: Any) -> Row:
    """Compare BERT's losses and gradients: unpadded with dense, compiled with eager."""
    case = Told(**options)
    sizes = TINY["bert"] if case.is_tiny else ("batch_size=16",)
    overrides = [*sizes, *(("compile=false",) if case.device == "cpu" else ())]
    checks = check(model, overrides, case.lengths(lengths))
    return {"checks": checks, "is_right": not list(failures(model, checks))}


def _compare_with_tolerance(differences: dict[str, float], tolerance: float) -> Row:
    """Return a row that is right if all differences are within the tolerance."""
    # NaN fails, too: it compares as False.
    is_right = all(difference <= tolerance for difference in differences.values())
    return {"differences": differences, "tolerance": tolerance, "is_right": is_right}


# Several micro-batches, so that the optimizer's share of the time is as small as in training.
TOKENS = 131_072
"""Tokens of a step."""
WARM_UP, STEPS = 3, 8
TRACED_AFTER = 3


def machine(**options: Any) -> Row:
    """Return a description of the machine and its software."""
    Told(**options)
    device = current_device()
    about: Row = {
        "device": device_name(device),
        "peak_flops": peak_flops(device),
        "mfu_convention": MFU_CONVENTION,
        "versions": {"python": platform.python_version(), "torch": torch.__version__},
        "cuda": torch.version.cuda,
    }
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        about["memory_bytes"] = properties.total_memory
        about["multiprocessors"] = properties.multi_processor_count
    return about


def steps(
    *,
    model: str,
    overrides: Sequence[str],
    lengths: str = "full",
    padded: bool = False,
    aim: float | None = None,
    published: float | None = None,
    **options: Any,
) -> Row:
    """Measure steps as `elastrata bench step` does, with the planner's memory estimate.

    Args:
        model: name of the recipe.
        overrides: overrides of the recipe.
        lengths: lengths of the samples.
        padded: whether samples are padded and attention is dense, as in most training code.
        aim: target MFU.
        published: published sequences per second to compare with.
        options: see `CaseOptions`.
    """
    case = Told(**options)
    recipe = case.recipe(model, [*_batch_size_override(case, model), *overrides])
    histogram = case.lengths(lengths)
    if padded:
        recipe = padded_recipe(recipe, histogram)
    counts = (WARM_UP, STEPS) if case.is_measured else (1, 2)
    samples = bench_samples(recipe, histogram, steps=sum(counts))
    plan, allocated = _plan_bytes(recipe, samples)
    row: Row = {"layers": recipe.workload.num_layers, "precision": recipe.precision} | {
        "compile": recipe.compile,
        "micro_batch_tokens": recipe.micro_batch_tokens,
        "plan_bytes": round(plan),
        "plan_allocated_bytes": round(allocated),
        "aim": aim,
    }
    _check_memory(plan)
    is_padded = isinstance(recipe.workload, PaddedBert)
    with attention_by(padded_attention) if is_padded else nullcontext():
        figures = asdict(measure_steps(recipe, samples, warm_up=counts[0]))
    # The row of the case `machine` has it.
    del figures["mfu_convention"]
    row |= {**figures, "allocated_bytes": figures.pop("peak_memory_bytes")}
    if current_device().type == "cuda":
        row["reserved_bytes"] = torch.cuda.max_memory_reserved()
    if published:
        rate = figures["sequences_per_second"]["median"]
        row["over_published"] = round(rate / published, 3)
    return row


def _batch_size_override(case: Told, model: str) -> list[str]:
    if case.is_tiny or not model.startswith("gpt/"):
        return []
    recipe = load_recipe(model, [])
    tokens = TOKENS if case.is_measured else 2 * recipe.micro_batch_tokens
    return [f"batch_size={tokens // recipe.data.prepare.seq_len}"]


def _plan_bytes(recipe: Recipe, samples: Samples) -> tuple[float, float]:
    """Return the planned memory of a step on one device, total and allocated by tensors only.

    The latter excludes the planner's allowances for the driver and for fragmentation.
    """
    device = current_device()
    name = device_name(device) if device.type == "cuda" else "CPU"
    spec = model_spec(recipe.workload, samples.vocabulary, samples.seq_len)
    layout = group_layout(recipe.parallel, 1)
    tokens = recipe.micro_batch_tokens
    choices = phase_choices(recipe, recipe, spec, (tokens,), layout, group_cluster(name, 1, 1))
    (choice,) = choices.all
    planned = choices.bytes(choice)
    wasted = 1 + choices.machine.stack.fragmentation
    return planned, (planned - choices.cluster.device.reserved_bytes) / wasted


def _check_memory(plan: float) -> None:
    """Raise OutOfMemoryError if the plan exceeds the free memory by more than 10%."""
    if current_device().type == "cuda":
        # Saves minutes of building and compiling a model that would run out of memory anyway.
        free, _ = torch.cuda.mem_get_info()
        # Plans may be a few percent too high.
        if plan > 1.1 * free:
            raise torch.OutOfMemoryError(f"the plan has {plan:.4g} bytes, {free:.4g} are free")


def trace(*, model: str, overrides: Sequence[str], lengths: str, **options: Any) -> Row:
    """Profile one step of two micro-batches: write a trace file and return the longest kernels."""
    case = Told(**options)
    recipe = case.recipe(model, overrides)
    # Roughly the mean of natural lengths.
    mean = recipe.data.prepare.seq_len if lengths == "full" else 256
    size = max(2, 2 * recipe.micro_batch_tokens // mean)
    recipe = recipe.model_copy(update={"batch_size": size} if not case.is_tiny else {})
    samples = bench_samples(recipe, case.lengths(lengths), steps=TRACED_AFTER + 1)
    file = Path(case.folder, f"trace-{model.replace('/', '-')}.json.gz")
    with lone_group(current_device()):
        run = steps_after(*engine(recipe, samples, current_device()), samples, 0)
        for _ in range(TRACED_AFTER):
            next(run)
        with profile(activities=_activities()) as profiled:
            record = next(run)
            _wait()
    profiled.export_chrome_trace(str(file))
    # Sorted by the time on the device: the host only launches kernels.
    by = "self_device_time_total" if current_device().type == "cuda" else "self_cpu_time_total"
    events = sorted(profiled.key_averages(), key=lambda event: -getattr(event, by))[:15]
    longest = [
        {"name": event.key[:120], "count": event.count, "ms": round(getattr(event, by) / 1e3, 3)}
        for event in events
    ]
    return {"file": file.name, "seconds": record.seconds, "longest": longest}


def _activities() -> list[ProfilerActivity]:
    on_device = [ProfilerActivity.CUDA] if current_device().type == "cuda" else []
    return [ProfilerActivity.CPU, *on_device]


def two_four_products(*, model: str, **options: Any) -> Row:
    """Compare every layer's products with 2:4 kernels with dense ones."""
    case = Told(**options)
    repeats = 1 if case.is_tiny else 20
    rows = products(case.recipe(model), repeats, lambda function, *args: function(*args))
    return {"products": list(rows)}


def clip_beside(*, model: str, overrides: Sequence[str], lengths: str, **options: Any) -> Row:
    """Measure the share of clipping that overlaps other work."""
    case = Told(**options)
    recipe = case.recipe(model, overrides)
    return {"clip": profiled_clip(recipe, case.lengths(lengths))}


def _wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
