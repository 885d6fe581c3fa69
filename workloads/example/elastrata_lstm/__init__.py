"""A language model of LSTMs, as an example workload for Elastrata."""

from elastrata_lstm.workload import Lstm

__all__ = ["Lstm"]
