"""An embedding whose table is divided, by rows, over ranks that compute a sample together.

Letters: T tokens of the micro-batch, V rows of the table, R rows of one rank, V / number of ranks,
E hidden size.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, distribute_module, distribute_tensor
from torch.distributed.tensor.parallel import ParallelStyle

_ROWS = 0
"""The dim of the table that is divided."""


class DividedEmbedding(ParallelStyle):
    """Divides the rows of an `nn.Embedding`, of which every rank must get equally many.

    As in Megatron-LM (Shoeybi et al. 2019, arXiv 1909.08053, section 3): each rank looks up the ids
    whose rows it has, and one all-reduce puts the hidden states together. Its part of the table's
    gradient is all that a rank computes: torch's `RowwiseParallel` makes that of the whole table
    on every rank. Ids and hidden states are plain tensors, whole on every rank.
    """

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        if not isinstance(module, nn.Embedding):
            raise TypeError(f"expected an Embedding, got {type(module).__name__}")
        divided = distribute_module(module, device_mesh, self._divided)
        vars(divided)["forward"] = partial(_looked_up, divided)
        return divided

    def _divided(self, _: str, module: nn.Module, mesh: DeviceMesh) -> None:
        for name, table in list(module.named_parameters(recurse=False)):
            rows = distribute_tensor(table, mesh, [Shard(_ROWS)], src_data_rank=self.src_data_rank)
            setattr(module, name, nn.Parameter(rows, requires_grad=table.requires_grad))


def _looked_up(module: nn.Module, ids: Tensor) -> Tensor:
    """Hidden states of shape [T, E] from ids of shape [T]. Collective over the ranks."""
    table: Any = module.weight
    if not isinstance(table, DTensor):
        raise TypeError(f"expected a divided table, got {type(table).__name__}")
    mesh, rows = table.device_mesh, table.to_local()
    own = ids - mesh.get_local_rank() * rows.shape[_ROWS]
    hidden: Tensor = _Lookup.apply(rows, own, mesh.get_group())  # type: ignore[no-untyped-call]
    return hidden


class _Lookup(torch.autograd.Function):
    """Rows of a table of which this rank has some, and others the others."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, ids: Tensor, group: dist.ProcessGroup) -> Tensor:
        """Shape [T, E], the same on every rank.

        Args:
            ctx: torch's.
            rows: shape [R, E].
            ids: shape [T]: counted from this rank's first row, so maybe none of its own.
            group: the ranks.
        """
        is_elsewhere = (ids < 0) | (ids >= rows.shape[_ROWS])
        ids = ids.masked_fill(is_elsewhere, 0)
        hidden = F.embedding(ids, rows).masked_fill_(is_elsewhere[..., None], 0.0)
        dist.all_reduce(hidden, group=group)
        ctx.save_for_backward(ids, is_elsewhere)
        ctx.num_rows = rows.shape[_ROWS]
        return hidden

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        """This rank's rows have the gradients of the tokens that were looked up in them."""
        ids, is_elsewhere = ctx.saved_tensors
        of_own = gradients[0].masked_fill(is_elsewhere[..., None], 0.0)
        never = -1  # no id is left out, as that of padding would be
        table = torch.ops.aten.embedding_dense_backward(of_own, ids, ctx.num_rows, never, False)
        return table, None, None
