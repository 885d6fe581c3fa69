"""Kinds of ranks by node: the devices that a group's workers compute on, and which of them have
room for fewer tokens."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from elastrata.cluster.node_speeds import Node, devices_of, names_of
from elastrata.cluster.nodes import nodes
from elastrata.recipe.recipe import Recipe
from elastrata_pipelines.speeds import RankKind, RankKinds, kinds_of_groups, one_kind


def kinds_by_node(recipe: Recipe) -> Callable[[Sequence[str]], RankKinds]:
    """The kinds of any group of workers, by the nodes that they are on. Where a recipe has one
    number of tokens for all, there is one kind."""
    fewer, parallel = recipe.workers.micro_batch_tokens, recipe.parallel
    if not fewer and all(part.micro_batch_tokens != "auto" for part in recipe.parts):
        return one_kind
    return NodeKinds(fewer=fewer, copies=parallel.tensor, repeats=parallel.pipeline)


@dataclass(frozen=True, kw_only=True)
class NodeKinds:
    """The kinds of any group of workers. A value."""

    fewer: Mapping[str, int]
    """By the name of a node or a device: most tokens of a micro-batch there."""
    copies: int
    """So many neighbouring ranks have the same rows."""
    repeats: int
    """The ranks that have all rows between them come so many times over."""

    def __call__(self, node_ids: Sequence[str]) -> RankKinds:
        """The kinds of the data ranks of a group, whose ranks are on these nodes."""
        by_id = {node["NodeID"]: self._kind(node) for node in nodes() if node["Alive"]}
        kinds = tuple(by_id.get(node, RankKind()) for node in node_ids)
        return kinds_of_groups(kinds, copies=self.copies, repeats=self.repeats)

    def _kind(self, node: Node) -> RankKind:
        device = "/".join(devices_of(node))
        named = [name for name in names_of(node) if name in self.fewer]
        if not named:
            return RankKind(device)
        most = self.fewer[named[0]]
        return RankKind(device if named[0] == device else f"{device} of {named[0]}", most)
