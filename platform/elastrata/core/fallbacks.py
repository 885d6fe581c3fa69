"""Substitutions: what a recipe asks for and a machine lacks, and what it does instead."""

from __future__ import annotations

import torch

from elastrata.core.device import DeviceCapabilities


def substitutions(
    capabilities: DeviceCapabilities, *, dtype: torch.dtype, compile: bool, skip_zeros: bool = False
) -> list[str]:
    """One line for each; empty where there is all that is asked for.

    Workloads have keys of their own, and `Workload.substitutions` for them.

    Args:
        capabilities: of the machine.
        dtype: the model is to be computed in.
        compile: whether it is to be compiled.
        skip_zeros: whether 2:4 kernels are to multiply.
    """
    lines = []
    if dtype == torch.bfloat16 and not capabilities.has_bf16:
        lines.append(
            f"precision: bf16: {capabilities.device} has no instructions for it; PyTorch converts "
            "to and from fp32 instead, which is slow"
        )
    if compile and not capabilities.can_compile:
        lines.append(
            f"compile: true: {capabilities.missing_compiler} is not on the path; operators run one "
            "by one instead"
        )
    if skip_zeros and not capabilities.skips_zeros:
        lines.append(
            f"sparsity.kernels: true: {capabilities.device} has no 2:4 kernels; zeros are "
            "multiplied like other weights"
        )
    return lines
