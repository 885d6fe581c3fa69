"""Tokens/s over a slow network, by volume and schedule of the communication.

    python benchmarks/slow_network.py DATA_SET

Connects two network namespaces by a virtual cable with limited rate (Linux: veth and tc's token
bucket filter; needs root and Debian's iproute2). Each namespace has one gloo rank with one thread.
Both train BERT-mini on DATA_SET, which `elastrata prepare bert/wikitext-mini` wrote, through the
engine's own step. In every round each technique takes one step; the figures are medians over the
rounds.

- compute: the same step with a separate model on each rank, so that nothing is sent.
- communication: the messages of one step, repeated one after the other, without computation.
- hidden: the share of the communication that does not extend the step, 1 - (step - compute) /
  communication; null if the communication is too short to measure.
- sent: bytes that one end sends in a step, as counted by the device.
- errors: differences of bf16 sums from fp32 over 100 steps.

Writes results/slow_network.json and .png after every part. Parts that are not measured again keep
their earlier figures. The part 100M takes nine minutes, each other one about one minute.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from clipping import steps_of
from harness import RESULTS, known_result, parser_of, picture, write_result
from torch import Tensor
from torch.distributed.tensor import DTensor

from elastrata.optim.optimizer import build_optimizer
from elastrata.parallel.mesh import rank_mesh
from elastrata.parallel.parallelize import parallelize
from elastrata.recipe.file import load_recipe
from elastrata.step.clip import Clip, build_clip
from elastrata.step.forward_backward import WholeModel
from elastrata.step.train_step import reduce_sums, train_step
from elastrata.trainer.preflight import find_training_data

RANKS = 2
RATES = {"100M": 100, "1G": 1_000, "10G": 10_000, "unlimited": 0}
"""Rates in megabits per second; 0: no limit."""
ERRORS = "errors"
RESULT = "slow_network"
# Visible only within the namespaces.
ADDRESSES, PORT = ("10.77.77.1", "10.77.77.2"), 29511
# Long, as a step at 100 Mbit/s takes many seconds.
PATIENCE = timedelta(seconds=120)
# Functions of `torch.distributed` through which FSDP2 and the engine communicate.
MESSAGES = ("all_gather_single", "reduce_scatter_single", "all_to_all_single", "all_reduce")
PROBE_BYTES = 8 * 2**20
# Shorter communication is lost in the noise of the computation.
SHORTEST_TO_TELL = 0.2
"""Minimum communication time, as a share of the computation, to measure its overlap."""
LOSS_STEPS, LOSS_BATCH = 100, 8


@dataclass(frozen=True)
class Technique:
    """A way to train on two ranks."""

    parallel: Mapping[str, Any]
    micro_batches: int = 4
    """Micro-batches per step and rank."""
    precision: str = "fp32"
    sum_every: bool = False
    """Whether gradients are summed after every micro-batch instead of once per step."""
    alone: bool = False
    """Whether each rank trains a separate model and sends nothing."""


KEPT = {"reshard_after_forward": False}
COPIES = {"replicate": "all"}
BF16 = {"reduce_dtype": "bf16"}
OVERLAP = {"overlap_on_cpu": True}
TECHNIQUES = {
    "FSDP, sums every micro-batch": Technique({}, sum_every=True),
    "FSDP": Technique({}),
    "FSDP, overlap": Technique(OVERLAP),
    "FSDP, kept": Technique(KEPT),
    "FSDP, kept, bf16 sums": Technique({**KEPT, **BF16}),
    "FSDP, kept, bf16 sums and gathers": Technique({**KEPT, **BF16}, precision="bf16"),
    "FSDP, kept, bf16 sums, overlap": Technique({**KEPT, **BF16, **OVERLAP}),
    "copies": Technique(COPIES),
    "copies, bf16 sums": Technique({**COPIES, **BF16}),
    "copies, bf16 sums, overlap": Technique({**COPIES, **BF16, **OVERLAP}),
    "copies, bf16 sums, overlap, 8 micro-batches": Technique(
        {**COPIES, **BF16, **OVERLAP}, micro_batches=8
    ),
}


@contextmanager
def network(megabits: int) -> Iterator[list[str]]:
    """Create two namespaces, connected by a cable with this rate in each direction; yield their
    names."""
    names = [f"elastrata-{os.getpid()}-{end}" for end in range(RANKS)]
    devices = [device_of(name) for name in names]
    try:
        for name in names:
            ip("netns", "add", name)
        end, other = [("name", d, "netns", n) for d, n in zip(devices, names, strict=True)]
        ip("link", "add", *end, "type", "veth", "peer", *other)
        for name, device, address in zip(names, devices, ADDRESSES, strict=True):
            ip("-n", name, "addr", "add", f"{address}/30", "dev", device)
            ip("-n", name, "link", "set", "lo", "up")
            ip("-n", name, "link", "set", device, "up")
            if megabits:
                # 4 ms of data, and at least two large packets: a smaller bucket does not reach the
                # rate.
                burst = max(2**17, megabits * 1_000_000 // 8 // 250)
                limit = f"tbf rate {megabits}mbit burst {burst} latency 50ms"
                tc = f"tc qdisc add dev {device} root {limit}"
                ip("netns", "exec", name, *tc.split())
        yield names
    finally:
        for name in names:
            # Deletes the device, too. If the setup failed, there may be no such namespace.
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)


def device_of(namespace: str) -> str:
    # Linux limits names of network devices to 15 characters.
    return "el" + namespace.removeprefix("elastrata-")


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True)


class Training:
    """Trains step after step with one technique."""

    def __init__(self, technique: Technique, rank: int, overrides: Sequence[str]) -> None:
        recipe = load_recipe(
            "bert/wikitext-mini",
            [
                f"batch_size={4 * RANKS * technique.micro_batches}",
                "micro_batch_tokens=512",
                f"precision={technique.precision}",
                f"parallel={json.dumps(technique.parallel)}",
                *overrides,
            ],
        )
        self._manifest = find_training_data(recipe).train.manifest
        self._workload, self._technique, self._seed = recipe.workload, technique, recipe.seed
        torch.manual_seed(recipe.seed)
        self.model = self._workload.build_model(self._manifest.vocabulary, self._manifest.seq_len)
        mesh = rank_mesh("cpu", RANKS, "all" if technique.alone else recipe.parallel.replicate)
        parallelize(
            self.model,
            self._workload.blocks(self.model),
            # With `replicate: all` a shard group is a single rank, which sends nothing.
            mesh["shard"] if technique.alone else mesh,
            precision=recipe.precision,
            activation_checkpointing="none",
            compile=False,
            parallel=recipe.parallel,
        )
        blocks = self._workload.blocks(self.model)
        self._optimizer = build_optimizer(recipe.optimizer, self.model, blocks)
        self.clip: Clip = build_clip(recipe.clip, self.model)
        self._steps = steps_of(recipe, rank, RANKS)

    def step(self) -> dict[str, float]:
        """Take one step; return its seconds, its tokens on both ranks, and the loss."""
        part = next(self._steps)
        vocabulary = self._manifest.vocabulary
        batches = [
            self._workload.collate(rows, vocabulary, self._seed) for rows in part.micro_batches
        ]
        weight = sum(batch.weights["mlm"] for batch in batches)
        # Communication that is the same for all techniques, before the measured part.
        sums = reduce_sums({"mlm": weight, "tokens": len(part.rows.tokens)})
        dist.barrier()
        started = time.perf_counter()
        result = train_step(
            WholeModel(self.model, self._workload),
            self._optimizer,
            batches,
            weights={"mlm": sums["mlm"]},
            clip=self.clip,
            rounds=len(batches) if self._technique.sum_every else 1,
        )
        seconds = time.perf_counter() - started
        return {"seconds": seconds, "tokens": sums["tokens"], "loss": result.loss.total}


@contextmanager
def recorded(messages: list[Callable[[], Any]]) -> Iterator[None]:
    """Record every message sent within the block, as a function that sends zeros instead."""

    def recording(message: Callable[..., Any]) -> Callable[..., Any]:
        def record(*args: Any, **kwargs: Any) -> Any:
            blank = [torch.zeros_like(a) if isinstance(a, Tensor) else a for a in args]
            named = {
                key: torch.zeros_like(value) if isinstance(value, Tensor) else value
                for key, value in kwargs.items()
            }
            # Blocking, so that repeated messages do not overlap.
            messages.append(lambda: message(*blank, **{**named, "async_op": False}))
            return message(*args, **kwargs)

        return record

    with ExitStack() as stack:
        for name in MESSAGES:
            stack.enter_context(patch.object(dist, name, recording(getattr(dist, name))))
        yield


def seconds_to_send(messages: Sequence[Callable[[], Any]], times: int) -> float:
    """Return the median seconds of these messages, sent one after the other."""
    seconds = []
    for _ in range(times):
        dist.barrier()
        started = time.perf_counter()
        for message in messages:
            message()
        seconds.append(time.perf_counter() - started)
    return statistics.median(seconds)


def sent_bytes(device: str) -> int:
    return int(Path(f"/sys/class/net/{device}/statistics/tx_bytes").read_text(encoding="utf-8"))


def measured_megabits() -> float:
    """Return the measured rate in megabits per second, one way."""
    payload = torch.zeros(PROBE_BYTES, dtype=torch.uint8)
    there_and_back = [partial(dist.broadcast, payload, src=rank) for rank in range(RANKS)]
    # A broadcast between two ranks is one message from `src` to the other.
    seconds = seconds_to_send(there_and_back, 5)
    return round(RANKS * PROBE_BYTES * 8 / seconds / 1e6, 1)


def measure_rate(
    rank: int, device: str, overrides: Sequence[str], names: Sequence[str], rounds: int
) -> dict[str, Any]:
    """Measure every technique over the current network."""
    techniques = {name: TECHNIQUES[name] for name in names}
    # One computation-only baseline for each shape of step.
    baselines = {
        (t.micro_batches, t.precision): Training(
            Technique({}, t.micro_batches, t.precision, alone=True), rank, overrides
        )
        for t in techniques.values()
    }
    trainings = {name: Training(t, rank, overrides) for name, t in techniques.items()}
    messages: dict[str, list[Callable[[], Any]]] = {name: [] for name in trainings}
    for name, training in trainings.items():
        with recorded(messages[name]):
            training.step()
    steps: dict[str, list[dict[str, float]]] = {name: [] for name in trainings}
    sent: dict[str, list[int]] = {name: [] for name in trainings}
    alone: dict[tuple[int, str], list[float]] = {key: [] for key in baselines}
    for _ in range(rounds + 1):  # the first to warm up
        for key, baseline in baselines.items():
            alone[key].append(baseline.step()["seconds"])
        for name, training in trainings.items():
            before = sent_bytes(device)
            steps[name].append(training.step())
            sent[name].append(sent_bytes(device) - before)
    figures = {}
    for name, technique in techniques.items():
        compute = statistics.median(alone[technique.micro_batches, technique.precision][1:])
        seconds = statistics.median(step["seconds"] for step in steps[name][1:])
        communication_seconds = seconds_to_send(messages[name], 3)
        is_measurable = communication_seconds > SHORTEST_TO_TELL * compute
        figures[name] = {
            "tokens_per_second": round(
                statistics.median(step["tokens"] / step["seconds"] for step in steps[name][1:]), 1
            ),
            "seconds": round(seconds, 4),
            "seconds_of_steps": [round(step["seconds"], 4) for step in steps[name][1:]],
            "compute_seconds": round(compute, 4),
            "communication_seconds": round(communication_seconds, 4),
            "hidden": round(1 - (seconds - compute) / communication_seconds, 3)
            if is_measurable
            else None,
            "sent_megabytes": round(statistics.median(sent[name][1:]) / 1e6, 2),
            "messages": len(messages[name]),
        }
    return {"measured_megabits_per_second": measured_megabits(), "techniques": figures}


class Watched:
    """A clip that stores the gradient it receives and does not change it."""

    def __init__(self, training: Training) -> None:
        self._parameters = list(training.model.parameters())
        self._clip = training.clip
        self.gradient = torch.zeros(0)

    def before_backward(self, share: float) -> None:
        self._clip.before_backward(share)

    def after_backward(self) -> Tensor:
        gradients = [p.grad for p in self._parameters if isinstance(p.grad, DTensor)]
        self.gradient = torch.cat([g.full_tensor().flatten().clone() for g in gradients])
        return self._clip.after_backward()


def measure_errors(
    rank: int, device: str, overrides: Sequence[str], names: Sequence[str], rounds: int
) -> dict[str, Any]:
    """Compare bf16 sums with fp32: the gradient of the first step, and the losses."""
    ways = {"fp32": {}, "sharded": BF16, "copies": {**BF16, **COPIES}}
    gradients, losses = {}, {}
    for name, parallel in ways.items():
        small = [f"batch_size={LOSS_BATCH}", *overrides]
        training = Training(Technique(parallel), rank, small)
        plain = training.clip
        # Only for the first step: later gradients also differ because the weights do.
        training.clip = watched = Watched(training)
        losses[name] = [training.step()["loss"]]
        gradients[name], training.clip = watched.gradient, plain
        losses[name] += [training.step()["loss"] for _ in range(LOSS_STEPS - 1)]
    exact = gradients["fp32"]
    return {
        name: {
            "relative_error_of_the_gradient": float(
                (gradients[name] - exact).norm() / exact.norm()
            ),
            "largest_relative_difference_of_a_loss": max(
                abs(a - b) / b for a, b in zip(losses[name], losses["fp32"], strict=True)
            ),
            "mean_of_the_last_10_losses": round(statistics.fmean(losses[name][-10:]), 4),
        }
        for name in ways
    }


MEASUREMENTS = {"rate": measure_rate, "errors": measure_errors}


def on_rank(arguments: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"tcp://{ADDRESSES[0]}:{PORT}",
        rank=arguments.rank,
        world_size=RANKS,
        timeout=PATIENCE,
    )
    overrides = [f"data.path={arguments.data_set}", *arguments.overrides]
    measure = MEASUREMENTS[arguments.measurement]
    device = os.environ["GLOO_SOCKET_IFNAME"]
    figures = measure(arguments.rank, device, overrides, arguments.techniques, arguments.rounds)
    if arguments.rank == 0:
        Path(arguments.found).write_text(json.dumps(figures), encoding="utf-8")
    dist.barrier()
    dist.destroy_process_group()


def measured(measurement: str, megabits: int, arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the figures of rank 0 over a cable of this rate."""
    with tempfile.TemporaryDirectory() as folder, network(megabits) as names:
        result_path = Path(folder) / "found.json"
        command = [sys.executable, __file__, arguments.data_set, *arguments.overrides]
        command += ["--measurement", measurement, "--found", str(result_path)]
        command += ["--rounds", str(arguments.rounds), "--techniques", *arguments.techniques]
        ranks = [
            subprocess.Popen(
                ["ip", "netns", "exec", name, *command, "--rank", str(rank)],
                env={**os.environ, "GLOO_SOCKET_IFNAME": device_of(name)},
            )
            for rank, name in enumerate(names)
        ]
        try:
            codes = [process.wait() for process in ranks]
        finally:
            # An interrupted script must not leave ranks behind.
            for process in ranks:
                process.kill()
                process.wait()
        if any(codes):
            raise SystemExit(f"a rank ended with {codes}")
        result: dict[str, Any] = json.loads(result_path.read_text(encoding="utf-8"))
        return result


def draw(rates: Mapping[str, Any], path: Path) -> None:
    """Draw a group of bars for every rate: tokens/s relative to the computation alone."""
    figure = picture(9, 4.5)
    axes = figure.subplots()
    names = [
        name
        for name, technique in TECHNIQUES.items()
        if technique.micro_batches == 4
        and all(name in rate["techniques"] for rate in rates.values())
    ]
    width = 0.85 / len(names)
    for order, name in enumerate(names):
        by_rate = [rate["techniques"][name] for rate in rates.values()]
        shares = [one["compute_seconds"] / one["seconds"] for one in by_rate]
        places = [place + (order - len(names) / 2) * width for place in range(len(rates))]
        axes.bar(places, shares, width, label=name)
    axes.set_xticks(range(len(rates)), list(rates))
    axes.axhline(1, color="black", linewidth=0.8)
    axes.set_ylabel("speed beside no communication")
    figure.legend(frameon=False, fontsize=8, loc="outside right center")
    figure.savefig(path)


def write(part: str, found: dict[str, Any]) -> None:
    """Write a part's figures, keeping those of other parts from earlier calls."""
    earlier_figures = known_result(RESULT)
    measured_rates = {
        **earlier_figures.get("rates", {}),
        **({part: found} if part in RATES else {}),
    }
    errors = found if part == ERRORS else earlier_figures.get(ERRORS)
    figures = {
        "ranks": RANKS,
        "rates": {name: measured_rates[name] for name in RATES if name in measured_rates},
        **({ERRORS: errors} if errors else {}),
    }
    draw(figures["rates"], RESULTS / f"{RESULT}.png")
    write_result(RESULT, figures, ("elastrata", "torch"))


def main() -> None:
    parser = parser_of(__doc__, rounds=5)
    parser.add_argument("data_set")
    parser.add_argument("overrides", nargs="*")
    parser.add_argument("--parts", nargs="*", choices=[*RATES, ERRORS], default=[*RATES, ERRORS])
    parser.add_argument("--techniques", nargs="*", choices=TECHNIQUES, default=[*TECHNIQUES])
    parser.add_argument("--only-print", action="store_true", help="write no result")
    parser.add_argument("--measurement", choices=MEASUREMENTS, help=argparse.SUPPRESS)
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--found", help=argparse.SUPPRESS)
    arguments = parser.parse_intermixed_args()
    if arguments.measurement:
        on_rank(arguments)
        return
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the namespaces go, too
    arguments.data_set = str(Path(arguments.data_set).resolve())
    for part in arguments.parts:
        kind = "rate" if part in RATES else "errors"
        figures = measured(kind, RATES.get(part, 0), arguments)
        if arguments.only_print:
            print(json.dumps(figures))
        else:
            write(part, figures)


if __name__ == "__main__":
    main()
