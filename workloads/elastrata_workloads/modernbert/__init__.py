"""ModernBERT: masked-language-model pre-training of an encoder with local attention."""

from elastrata_workloads.modernbert.workload import ModernBert

__all__ = ["ModernBert"]
