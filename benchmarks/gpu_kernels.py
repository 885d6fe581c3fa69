"""Kernels, checked and measured: dense BERT attention, overlap of clipping, 2:4 products."""

from __future__ import annotations

import bisect
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.profiler import ProfilerActivity, profile, record_function
from torch.sparse import SparseSemiStructuredTensor

import elastrata_workloads.unpadded.attention as self_attention
from elastrata.bench.samples import Samples, bench_samples, read_histogram
from elastrata.device.capabilities import current_device
from elastrata.device.kernels import SemiStructured, compress_weight
from elastrata.optim.optimizer import build_optimizer
from elastrata.parallel.mesh import lone_group
from elastrata.recipe.file import load_recipe
from elastrata.recipe.recipe import Recipe
from elastrata.sparsity.config import TwoFourConfig
from elastrata.sparsity.layers import layer_shapes
from elastrata.sparsity.rigl import random_masks
from elastrata.step.bucket_clip import RANGE
from elastrata.step.clip import Clip
from elastrata.step.forward_backward import weighted_loss
from elastrata.trainer.build_model import build_divided_model
from elastrata.trainer.trainer import build_loop
from elastrata_pipelines.batches import Start
from elastrata_pipelines.format import Vocabulary
from elastrata_pipelines.rows import Rows
from elastrata_workloads.bert import Bert
from elastrata_workloads.bert.objective import BertBatch
from elastrata_workloads.unpadded.attention import attention
from elastrata_workloads.unpadded.batch import Segments
from elastrata_workloads.unpadded.shapes import Kernel

Attention = Callable[..., Tensor]
"""Functions with the signature of `elastrata_workloads.unpadded.attention`, with one kernel and
without windows."""


@contextmanager
def attention_by(form: Attention) -> Iterator[None]:
    """Replace the attention function of all models within the block by `form`."""
    # Blocks look this name up in their module at every call.
    ours = self_attention.attention
    self_attention.attention = form
    try:
        yield
    finally:
        self_attention.attention = ours


def dense_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    segments: Segments,
    kernel: Kernel = "auto",
    **_: object,
) -> Tensor:
    """Pad [T, H, D] to [G, H, L, D], attend with a mask, and remove the padding again."""
    longest = max(segments.lengths)
    mask = length_mask(segments.lengths, longest).to(query.device)
    places = mask.flatten().nonzero().squeeze(1)
    q, k, v = (_padded(x, places, (len(mask), longest)) for x in (query, key, value))
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask[:, None, None, :])
    return out.transpose(1, 2).flatten(0, 1).index_select(0, places)


def length_mask(lengths: tuple[int, ...], longest: int) -> Tensor:
    """Return a mask of shape [G, L], true for real tokens."""
    return torch.arange(longest) < torch.tensor(lengths)[:, None]


def _padded(x: Tensor, places: Tensor, shape: tuple[int, int]) -> Tensor:
    flat = x.new_zeros(shape[0] * shape[1], *x.shape[1:]).index_copy(0, places, x)
    return flat.unflatten(0, shape).transpose(1, 2)


@dataclass(frozen=True, eq=False)
class PaddedSegments(Segments):
    """Segments of padded samples, which all have L positions."""

    mask: Tensor
    """Shape [G, 1, 1, L]: true for real tokens."""


def padded_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    segments: PaddedSegments,
    kernel: Kernel = "auto",
    **_: object,
) -> Tensor:
    """Return the attention over already padded tokens, by one dense call."""
    shape = (segments.mask.shape[0], segments.mask.shape[3])
    q, k, v = (x.unflatten(0, shape).transpose(1, 2) for x in (query, key, value))
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=segments.mask)
    return out.transpose(1, 2).flatten(0, 1)


@dataclass(frozen=True, kw_only=True)
class PaddedBatch(BertBatch):
    """A micro-batch whose samples are padded to L positions."""

    mask: Tensor
    """Shape [G, 1, 1, L]: true for real tokens."""

    @property
    def segments(self) -> PaddedSegments:
        length = self.segment_lengths[0]
        return PaddedSegments(self.offsets, self.segment_lengths, longest=length, mask=self.mask)


class PaddedBert(Bert):
    """BERT over samples padded to `max_positions`; its models need `padded_attention`."""

    def collate(self, rows: Rows, vocabulary: Vocabulary, seed: int) -> PaddedBatch:
        return pad(super().collate(rows, vocabulary, seed), self.max_positions, vocabulary.pad_id)


def pad(batch: BertBatch, length: int, pad_id: int) -> PaddedBatch:
    """Return the batch with every sample padded to `length` positions.

    Only for masked language modelling without dropout.
    """
    mask = length_mask(batch.segment_lengths, length)
    samples = len(mask)
    places = mask.flatten().nonzero().squeeze(1)
    padding = torch.full((samples * length,), pad_id)
    return PaddedBatch(
        weights=batch.weights,
        num_positions=samples * length,
        input_ids=padding.index_copy(0, places, batch.input_ids),
        positions=torch.arange(length).repeat(samples),
        token_types=None,
        offsets=torch.arange(samples + 1, dtype=torch.int32) * length,
        segment_lengths=(length,) * samples,
        predicted=places[batch.predicted],
        targets=batch.targets,
        sample_starts=None,
        not_next=None,
        dropout_keys=None,
        mask=mask[:, None, None, :],
    )


def padded_recipe(recipe: Recipe, histogram: str) -> Recipe:
    """Return a recipe with padded samples and equally many positions per micro-batch."""
    counts = read_histogram(histogram)
    mean = sum(length * count for length, count in enumerate(counts)) / sum(counts)
    length = recipe.workload.max_positions
    # The budget counts real tokens; padded, they become about `micro_batch_tokens` positions.
    budget = max(length, round(recipe.micro_batch_tokens * mean / length))
    workload = PaddedBert(**recipe.workload.model_dump())
    return recipe.model_copy(update={"workload": workload, "micro_batch_tokens": budget})


ATTENDING = ".attention.self."
"""Part of the names of the parameters that compute query, key and value."""
# Measured on a CPU: attention differs by 2e-3 in bf16. Gradients of 24 layers in bf16 differ by
# 3e-2 from those in fp32, which bounds what compilation may change. In fp32 they differ by 4e-7; an
# error in which one sample of eight attends to its neighbour gave 4e-2 to 8e-2. So bf16 reveals
# gross errors of the model, attention alone and fp32 the subtle ones.
TOLERANCES = {
    "attention bf16": 1e-2,
    "loss bf16": 2e-3,
    "gradient bf16": 5e-2,
    "attention fp32": 1e-5,
    "loss fp32": 1e-5,
    "gradient fp32": 1e-4,
}
"""Tolerated relative differences, by quantity and precision."""


def check(name: str, overrides: Sequence[str], lengths: str) -> dict[str, Any]:
    """Return all differences of a recipe's first step, each with its tolerance.

    Args:
        name: name of the recipe.
        overrides: overrides of its keys, such as the number of samples to compare.
        lengths: see `bench_samples`.
    """
    recipe = _with_sharp_attention(load_recipe(name, overrides))
    bert, samples = recipe.workload, bench_samples(recipe, lengths, steps=1)
    differences = {
        **check_attention(
            tuple(samples.steps[0].rows.lengths.tolist()),
            bert.num_heads,
            bert.hidden_size // bert.num_heads,
        ),
        **check_model(recipe, samples),
    }
    return {
        what: {"difference": value, "tolerance": TOLERANCES[what.split(",")[0]]}
        for what, value in differences.items()
    }


def _with_sharp_attention(recipe: Recipe) -> Recipe:
    """Return the recipe with initial weights so large that scores differ by about 1."""
    # With the usual small weights all tokens count alike, and errors in attention hardly show.
    spread = recipe.workload.hidden_size**-0.5
    workload = recipe.workload.model_copy(update={"initializer_range": spread})
    return recipe.model_copy(update={"workload": workload})


def failures(name: str, checks: Mapping[str, Mapping[str, float]]) -> Iterator[str]:
    """Yield a line for each difference above its tolerance, or not a number."""
    for what, one in checks.items():
        # Not `>`, so that NaN counts as a failure.
        if not one["difference"] <= one["tolerance"]:
            limit = f"expected at most {one['tolerance']:g}"
            yield f"{name}: {what}: {one['difference']:.3g}, {limit}"


def relative(found: list[Tensor], wanted: list[Tensor]) -> float:
    """Return the 2-norm of all differences over the 2-norm of all expected values."""
    differences = torch.stack([(f - w).norm() for f, w in zip(found, wanted, strict=True)])
    return float((differences.norm() / torch.stack([w.norm() for w in wanted]).norm()).detach())


def attention_and_gradients(
    form: Attention, inputs: list[Tensor], segments: Segments, dtype: torch.dtype
) -> list[Tensor]:
    """Return the output, and the gradients of query, key and value."""
    query, key, value, weight = (x.to(dtype) for x in inputs)
    leaves = [x.requires_grad_() for x in (query, key, value)]
    out = form(*leaves, segments)
    return [x.float() for x in (out, *torch.autograd.grad(out, leaves, weight))]


def check_attention(lengths: tuple[int, ...], heads: int, head_size: int) -> dict[str, float]:
    """Compare unpadded with dense attention; return the largest difference of the four tensors."""
    device = current_device()
    torch.manual_seed(0)
    shape = (sum(lengths), heads, head_size)
    # Query, key, value, and the gradient of the output.
    inputs = [torch.randn(shape, device=device) for _ in range(4)]
    ends = torch.tensor(lengths).cumsum(0)
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), ends]).to(device, torch.int32)
    segments = Segments(offsets, lengths, max(lengths))
    differences = {}
    for name, dtype in (("bf16", torch.bfloat16), ("fp32", torch.float32)):
        ours, dense = (
            attention_and_gradients(form, inputs, segments, dtype)
            for form in (attention, dense_attention)
        )
        differences[f"attention {name}"] = max(
            relative([one], [other]) for one, other in zip(ours, dense, strict=True)
        )
    return differences


def loss_and_gradients(
    recipe: Recipe, samples: Samples, form: Attention = attention
) -> tuple[float, list[Tensor]]:
    """Return the first step's loss and the gradients of the query, key and value weights.

    These gradients reveal an error in attention best. Computed through the engine's sharded model.
    """
    device, workload = current_device(), recipe.workload
    with lone_group(device), attention_by(form):
        model = build_divided_model(recipe, samples.vocabulary, samples.seq_len, device, 1).model
        batches = [
            workload.collate(rows, samples.vocabulary, recipe.seed).to(device)
            for rows in samples.steps[0].micro_batches
        ]
        weights = {"mlm": sum(batch.weights["mlm"] for batch in batches)}
        loss = 0.0
        for batch in batches:
            part = weighted_loss(workload.loss(model, batch), weights)
            part.backward()
            loss += float(part.detach())
        return loss, [
            _whole(p.grad).cpu()
            for name, p in model.named_parameters()
            if ATTENDING in name and name.endswith("weight") and p.grad is not None
        ]


def _whole(gradient: Tensor) -> Tensor:
    return gradient.full_tensor() if isinstance(gradient, DTensor) else gradient


def check_model(recipe: Recipe, samples: Samples) -> dict[str, float]:
    """Compare loss and gradient of the first step, computed in several ways."""
    differences = {}
    for precision in ("bf16", "fp32"):
        eager = recipe.model_copy(update={"precision": precision, "compile": False})
        loss, gradients = loss_and_gradients(eager, samples)
        compiled = eager.model_copy(update={"compile": True})
        variants = {
            "unpadded against dense": loss_and_gradients(eager, samples, dense_attention),
            "eager against compiled": loss_and_gradients(compiled, samples),
        }
        for what, (other_loss, other_gradients) in variants.items():
            differences[f"loss {precision}, {what}"] = abs(loss - other_loss) / other_loss
            differences[f"gradient {precision}, {what}"] = relative(gradients, other_gradients)
    return differences


_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
# Events on the host that launch those on the device; a correlation id connects both.
_LAUNCHES = ("cuda_runtime", "cuda_driver")
_BACKWARD = "autograd::engine::evaluate_function"
_PROFILED_AFTER = 3
Interval = tuple[float, float]
"""Start and end in microseconds."""


@dataclass(frozen=True)
class _Launch:
    thread: Any
    time: float


class RangedClip:
    """A clip whose work after the backward pass also has a name in profiles."""

    def __init__(self, clip: Clip) -> None:
        self._clip = clip

    def before_backward(self, share: float) -> None:
        self._clip.before_backward(share)

    def after_backward(self) -> Tensor:
        with record_function(RANGE):
            return self._clip.after_backward()


def profiled_clip(recipe: Recipe, lengths: str) -> dict[str, Any]:
    """Return the share of clipping that overlaps other work in one step."""
    length = {"steps": 100, "epochs": None, "tokens": None}  # independent of the recipe's data
    recipe = recipe.model_copy(update=length)
    device, workload = current_device(), recipe.workload
    samples = bench_samples(recipe, lengths, steps=_PROFILED_AFTER + 1)
    activities = [ProfilerActivity.CPU]
    activities += [ProfilerActivity.CUDA] if device.type == "cuda" else []
    with lone_group(device), tempfile.TemporaryDirectory() as folder:
        divided = build_divided_model(recipe, samples.vocabulary, samples.seq_len, device, 1)
        blocks = workload.blocks(divided.model)
        optimizer = build_optimizer(recipe.optimizer, divided.model, blocks)
        loop = build_loop(recipe, divided.clip, samples.vocabulary, device, 1)
        loop = replace(loop, clip=RangedClip(loop.clip))
        run = loop.run(divided.forward_backward, optimizer, samples.steps, Start())
        for _ in range(_PROFILED_AFTER):
            next(run)
        if device.type == "cuda":
            torch.cuda.synchronize()
        with profile(activities=activities) as profiled:
            next(run)
            if device.type == "cuda":
                torch.cuda.synchronize()
        trace = Path(folder) / "trace.json"
        profiled.export_chrome_trace(str(trace))
        return clip_overlap(json.loads(trace.read_text(encoding="utf-8"))["traceEvents"], RANGE)


def clip_overlap(events: Sequence[Mapping[str, Any]], range_name: str) -> dict[str, Any]:
    """Return the duration and overlap of the named ranges in the trace of one step.

    Args:
        events: `traceEvents` of a Chrome trace.
        range_name: name of `record_function` around clipping.
    """
    timed = [event for event in events if event.get("ph") == "X"]
    ranges = _by_thread(e for e in timed if e.get("name") == range_name and _on_host(e))
    kernels = [event for event in timed if event.get("cat") in _DEVICE]
    if kernels:
        # On a GPU, the kernels that the ranges launched are counted, not the ranges on the host.
        return _kernel_overlap(timed, kernels, ranges)
    backward = [_interval(e) for e in timed if str(e.get("name", "")).startswith(_BACKWARD)]
    clips = merged(interval for of_thread in ranges.values() for interval in of_thread)
    window = [(min(start for start, _ in backward), max(end for _, end in backward))]
    return {
        "timeline": "host",
        "clip_ms": round(length(clips) / 1e3, 3),
        "share_inside_backward": share(clips, window),
    }


def _kernel_overlap(
    timed: Sequence[Mapping[str, Any]],
    kernels: Sequence[Mapping[str, Any]],
    ranges: Mapping[Any, list[Interval]],
) -> dict[str, Any]:
    launches = {
        event["args"]["correlation"]: _Launch(event.get("tid"), event["ts"])
        for event in timed
        if event.get("cat") in _LAUNCHES and "correlation" in event.get("args", {})
    }
    clips, communication, computing = [], [], []
    for kernel in kernels:
        launch = launches.get(kernel["args"].get("correlation"))
        # A kernel belongs to the range in which the host launched it.
        if launch and _is_inside(launch.time, ranges.get(launch.thread, [])):
            clips.append(_interval(kernel))
        elif "nccl" in kernel["name"].lower():
            communication.append(_interval(kernel))
        else:
            computing.append(_interval(kernel))
    clips = merged(clips)
    return {
        "timeline": "device",
        "clip_ms": round(length(clips) / 1e3, 3),
        "computing_ms": round(length(merged(computing)) / 1e3, 3),
        "communication_ms": round(length(merged(communication)) / 1e3, 3),
        "share_beside_computing": share(clips, computing),
        "share_beside_communication": share(clips, communication),
        "share_hidden": share(clips, [*computing, *communication]),
    }


def share(parts: Sequence[Interval], others: Iterable[Interval]) -> float | None:
    """Return the share of the parts' time, 0 to 1, that overlaps one of the others.

    None if the parts have no duration.
    """
    whole, parts, others = length(parts), merged(parts), merged(others)
    both, place = 0.0, 0
    for start, end in parts:
        while place < len(others) and others[place][1] <= start:
            place += 1
        later = place
        while later < len(others) and others[later][0] < end:
            both += min(end, others[later][1]) - max(start, others[later][0])
            later += 1
    return round(both / whole, 4) if whole else None


def merged(intervals: Iterable[Interval]) -> list[Interval]:
    """Return the intervals in order, with touching ones merged."""
    disjoint: list[Interval] = []
    for start, end in sorted(intervals):
        if disjoint and start <= disjoint[-1][1]:
            disjoint[-1] = (disjoint[-1][0], max(end, disjoint[-1][1]))
        else:
            disjoint.append((start, end))
    return disjoint


def length(intervals: Iterable[Interval]) -> float:
    """Return the total length of all intervals; overlaps count once."""
    return sum(end - start for start, end in merged(intervals))


def _by_thread(events: Iterable[Mapping[str, Any]]) -> dict[Any, list[Interval]]:
    intervals_by_thread: dict[Any, list[Interval]] = {}
    for event in events:
        intervals_by_thread.setdefault(event.get("tid"), []).append(_interval(event))
    return {thread: merged(intervals) for thread, intervals in intervals_by_thread.items()}


def _is_inside(time: float, intervals: Sequence[Interval]) -> bool:
    """Return whether a time is in one of the merged intervals."""
    place = bisect.bisect_right(intervals, (time, float("inf"))) - 1
    return place >= 0 and time <= intervals[place][1]


def _interval(event: Mapping[str, Any]) -> Interval:
    return float(event["ts"]), float(event["ts"]) + float(event.get("dur", 0.0))


def _on_host(event: Mapping[str, Any]) -> bool:
    return event.get("cat") in ("user_annotation", "cpu_op")


# Values of torch's switch `_FORCE_CUTLASS`.
LIBRARIES = {"cusparselt": False, "cutlass": True}
ROUNDS = 9


def products(
    recipe: Recipe, repeats: int, run: Callable[..., dict[str, float]]
) -> Iterator[dict[str, Any]]:
    """Yield a row for every layer shape and library.

    Args:
        recipe: its model, and the tokens of its micro-batches.
        repeats: number of calls that are timed together.
        run: calls `products_of` with its arguments, in a new process or not.
    """
    shapes = {shape: name for name, shape in reversed(layer_shapes(recipe.workload).items())}
    tokens = recipe.micro_batch_tokens
    for (rows, columns), name in shapes.items():
        for library in LIBRARIES:
            seconds = run(products_of, rows, columns, tokens, library, repeats)
            yield {
                **{"layer": name.partition(".")[2].partition(".")[2]},
                **{"rows": rows, "columns": columns, "tokens": tokens, "library": library},
                "seconds": {key: float(f"{value:.4g}") for key, value in seconds.items()},
                "forward_times_faster": _ratio(seconds, "forward"),
                "forward_backward_times_faster": _ratio(seconds, "forward_backward"),
            }


def _ratio(seconds: dict[str, float], what: str) -> float:
    return round(seconds[f"dense_{what}"] / seconds[f"sparse_{what}"], 3)


def products_of(
    rows: int, columns: int, tokens: int, library: str, repeats: int
) -> dict[str, float]:
    """Return the seconds of one layer's products."""
    SparseSemiStructuredTensor._FORCE_CUTLASS = LIBRARIES[library]
    device = current_device()
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    weight = torch.randn(rows, columns, device=device, dtype=dtype) / columns**0.5
    # The kernels require a 2:4 pattern.
    zero = random_masks(TwoFourConfig(method="two_four"), {"layer": weight}, {"layer": 0.5}, seed=0)
    weight.masked_fill_(zero["layer"], 0.0).requires_grad_()
    inputs = torch.randn(tokens, columns, device=device, dtype=dtype, requires_grad=True)
    gradient = torch.randn(tokens, rows, device=device, dtype=dtype)
    packed = _compress(weight.detach())
    # Also a check: both products must agree.
    error = (F.linear(inputs.detach(), packed) - F.linear(inputs.detach(), weight.detach())).abs()

    def forward_backward(forward: Callable[..., Tensor]) -> Callable[[], Any]:
        return lambda: torch.autograd.grad(
            forward(inputs, weight, None), (inputs, weight), gradient, allow_unused=True
        )

    with torch.no_grad():
        seconds = {
            "dense_forward": seconds_of(lambda: F.linear(inputs, weight), repeats),
            "sparse_forward": seconds_of(lambda: F.linear(inputs, packed), repeats),
            "compress": seconds_of(lambda: _compress(weight), repeats),
        }
    seconds["dense_forward_backward"] = seconds_of(forward_backward(F.linear), repeats)
    seconds["sparse_forward_backward"] = seconds_of(forward_backward(_sparse_linear), repeats)
    return {**seconds, "largest_difference": float(error.max())}


def _sparse_linear(inputs: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    out: Tensor = SemiStructured.apply(inputs, weight, bias, _compress)  # type: ignore[no-untyped-call]
    return out


def _compress(weight: Tensor) -> Tensor:
    """Return the compressed weight for the kernels, or on a CPU, which has none, the weight
    itself."""
    return weight if weight.device.type == "cpu" else compress_weight(weight)


def seconds_of(function: Callable[[], Any], repeats: int) -> float:
    """Return the seconds of one call, the median of several rounds."""
    rounds = []
    for number in range(ROUNDS + 1):
        _wait()
        start_time = time.perf_counter()
        for _ in range(repeats):
            function()
        _wait()
        if number:  # the first warms up
            rounds.append((time.perf_counter() - start_time) / repeats)
    return statistics.median(rounds)


def _wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
