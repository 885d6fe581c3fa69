"""Memory of a rehearsed rank, by kind: torch's MemTracker over steps of several micro-batches."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

from torch import nn
from torch.distributed._tools import mod_tracker
from torch.distributed._tools.mem_tracker import MemTracker
from typing_extensions import override

_TOTAL = "Total"


class PeakMemory(MemTracker):  # type: ignore[no-untyped-call]
    """The peak of a rank's memory on its device.

    torch's own keeps the peak of every module, too, looks at each of them after every operator,
    and refuses a module's second forward pass outside of another one.
    """

    @property
    def by_kind(self) -> dict[str, int]:
        """Bytes at the peak: parameters, gradients, activations, temporaries of the backward pass,
        optimizer states... as MemTracker calls them."""
        return {kind: size for kind, size in self._at_peak().items() if size and kind != _TOTAL}

    @property
    def bytes(self) -> int:
        """In all."""
        return self._at_peak().get(_TOTAL, 0)

    def _at_peak(self) -> dict[str, int]:
        peaks: Mapping[Any, Mapping[Any, int]] = self.get_tracker_snapshot("peak")
        sizes = next((sizes for device, sizes in peaks.items() if device.type == "cuda"), {})
        return {str(getattr(kind, "value", kind)): int(size) for kind, size in sizes.items()}

    @override
    def _update_peak_stats(self, peak_state: Any) -> None:
        for device, sizes in self._curr_mem_snap.items():
            if self._peak_mem.get(device, 0) < sizes[_TOTAL]:
                self._peak_mem[device] = sizes[_TOTAL]
                self._peak_mem_snap[device] = dict(sizes)

    @override
    def _pre_fw_hook(self, module: nn.Module, inputs: Any) -> None:
        if module in self.memory_tracking and not self._mod_tracker.is_bw:
            del self.memory_tracking[module]
        super()._pre_fw_hook(module, inputs)


@contextmanager
def track(*trained: nn.Module) -> Iterator[PeakMemory]:
    """While it lasts, memory is tracked, beginning with these modules' parameters and buffers."""
    peak = PeakMemory()
    peak.track_external(*trained)
    # It would follow modules through the backward pass, too, with hooks that refuse the divided one
    # of zero bubble.
    with patch.object(mod_tracker, "register_multi_grad_hook", lambda *_, **__: None), peak:
        yield peak
