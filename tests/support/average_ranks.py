"""One rank of a small FSDP2 training that averages its weights."""

from __future__ import annotations

from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from elastrata.checkpoints.commit import list_commits
from elastrata.checkpoints.save import DurableSaver
from elastrata.checkpoints.state import MODEL, load
from elastrata.step.average import AVERAGE, AverageConfig, WeightAverage
from elastrata_pipelines.storage import Storage
from support.checkpoint_ranks import Training

STEPS = 3


def averaged_on_ranks(rank: int, world_size: int, url: str) -> dict[str, Tensor]:
    """Trains, with the average in the weights' place for a while after every step, and saves. The
    average, whole."""
    training, average = _training()
    average.begin()
    for step in range(1, STEPS + 1):
        training.step(step)
        average.stepped(step)
        with average.swap_in():
            training.model(training.ids(step))
    saver = DurableSaver(Storage(url), keep_last=1, keep_best=False, warn=_refuse)
    saver.save(training.state() | average.state(), step=STEPS, samples=1, tokens=1)
    saver.close()
    return _whole(average)


def restored_on_ranks(rank: int, world_size: int, url: str) -> dict[str, Tensor]:
    """The average in the newest checkpoint there, whole."""
    _, average = _training()
    storage = Storage(url)
    load(storage, list_commits(storage)[0], average.state())
    return _whole(average)


def _training() -> tuple[Training, WeightAverage]:
    training = Training()
    sharded = [module for module in training.model.modules() if isinstance(module, FSDPModule)]
    return training, WeightAverage(AverageConfig(decay=0.9), training.state()[MODEL], sharded)


def _whole(average: WeightAverage) -> dict[str, Tensor]:
    tensors = average.state()[AVERAGE]
    return {
        name: (value.full_tensor() if isinstance(value, DTensor) else value).clone()
        for name, value in tensors.items()
    }


def _refuse(line: str) -> None:
    raise AssertionError(line)
