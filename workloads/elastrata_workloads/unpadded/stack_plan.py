"""The plan of tensor parallelism of a `Stack`."""

from __future__ import annotations

from torch.distributed.tensor import Placement, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
)

from elastrata_workloads.unpadded.stack import Stack
from elastrata_workloads.unpadded.tensor_parallel import (
    OwnKeys,
    Replicated,
    between,
    embedding_style,
    head_style,
    heads_norm_style,
    hidden_layout,
    norm_style,
    tied_head_style,
)


def plan(model: Stack, size: int, *, sequence: bool) -> dict[str, ParallelStyle]:
    """The style of every module: heads, feed-forwards and the vocabulary are divided.

    As in Megatron-LM (Shoeybi et al. 2019, arXiv 1909.08053; sequence parallelism: Korthikanti et
    al. 2022, arXiv 2205.05198). Logits stay divided over the vocabulary where it is.

    Args:
        model: a whole one.
        size: ranks.
        sequence: whether tokens are divided, too, between the matrices.
    """
    layout, names = hidden_layout(sequence), {name for name, _ in model.named_modules()}
    num_rows = model.embeddings.tokens.num_embeddings
    styles: dict[str, ParallelStyle] = {
        "embeddings.tokens": embedding_style(num_rows, size),
        "embeddings.positions": Replicated(),
        "embeddings.norm": Replicated(),
        **{f"blocks.*.{name}": style for name, style in _of_block(layout, sequence).items()},
        "norm": Replicated(),
        "head": (tied_head_style if model.is_tied else head_style)(num_rows, size),
    }
    if sequence:
        styles["embeddings"] = between(Replicate(), Shard(0))
        styles[f"blocks.{len(model.blocks) - 1}"] = between(Shard(0), Replicate())
    return {name: style for name, style in styles.items() if name.replace("*", "0") in names}


def _of_block(layout: Placement, sequence: bool) -> dict[str, ParallelStyle]:
    """Of every module that a block can have."""
    styles: dict[str, ParallelStyle] = {
        "attention_norm": norm_style(sequence),
        "attention": PrepareModuleInput(
            input_layouts=(layout, None, None), desired_input_layouts=(Replicate(), None, None)
        ),
        "attention.query": ColwiseParallel(),
        "attention.key": ColwiseParallel(),
        "attention.value": ColwiseParallel(),
        "attention.query_norm": heads_norm_style(),
        "attention.key_norm": heads_norm_style(),
        "attention.output": RowwiseParallel(output_layouts=layout),
        "feed_forward_norm": norm_style(sequence),
        "feed_forward": PrepareModuleInput(
            input_layouts=(layout,), desired_input_layouts=(Replicate(),)
        ),
        "feed_forward.gate": ColwiseParallel(),
        "feed_forward.up": ColwiseParallel(),
        "feed_forward.down": RowwiseParallel(output_layouts=layout),
    }
    if sequence:
        styles |= {"attention_dropout": OwnKeys(), "feed_forward_dropout": OwnKeys()}
    return styles
