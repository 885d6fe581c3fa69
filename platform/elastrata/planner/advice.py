"""Advice about the kinds of devices of a cluster: what each adds and costs, and whether it is worth
its messages."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from elastrata.planner.forecast import Forecast

_NOTHING = 1.005
"""Times the tokens per second without a kind: it adds next to nothing."""
_MILLION = 1e6
_HOUR = 3600.0


@dataclass(frozen=True, kw_only=True)
class KindAdvice:
    """What a kind adds to all others. The field names are keys of `elastrata plan --json`."""

    device: str
    devices: int
    is_worth_it: bool
    tokens_per_second_without: float | None
    """None: the others have not enough memory."""
    cost_per_million_tokens_without: float | None
    cost_per_million_tokens_added: float | None
    """Price of the kind over the tokens that it adds; None without prices, or if it adds none."""
    text: str
    """In a sentence."""


@dataclass(frozen=True, kw_only=True)
class Offer:
    """A kind that may be added."""

    device: str
    devices: int
    price: float | None
    """Of all its devices for an hour."""


def advice(
    whole: Forecast,
    offers: Sequence[Offer],
    without: Callable[[Offer], Forecast | None],
) -> tuple[KindAdvice, ...]:
    """What each kind adds.

    Args:
        whole: the best layout of all kinds together.
        offers: the kinds.
        without: the best layout of all kinds but one; None where nothing fits.
    """
    return tuple(_advice(whole, offer, without(offer)) for offer in offers)


def cost_per_million_tokens(forecast: Forecast) -> float | None:
    """None where the cluster has no price."""
    if forecast.cost is None:
        return None
    return forecast.cost / (forecast.hours * _HOUR * forecast.tokens_per_second) * _MILLION


def _advice(whole: Forecast, offer: Offer, others: Forecast | None) -> KindAdvice:
    name = f"{offer.devices}x{offer.device}"
    if others is None:
        return KindAdvice(
            device=offer.device,
            devices=offer.devices,
            is_worth_it=True,
            tokens_per_second_without=None,
            cost_per_million_tokens_without=None,
            cost_per_million_tokens_added=None,
            text=f"{name}: without them the others have too little memory",
        )
    before, after = others.tokens_per_second, whole.tokens_per_second
    is_worth_it = after >= _NOTHING * before
    added = None
    if is_worth_it and offer.price is not None:
        added = offer.price / ((after - before) * _HOUR) * _MILLION
    cost = cost_per_million_tokens(others)
    return KindAdvice(
        device=offer.device,
        devices=offer.devices,
        is_worth_it=is_worth_it,
        tokens_per_second_without=before,
        cost_per_million_tokens_without=cost,
        cost_per_million_tokens_added=added,
        text=f"{name}: {_verdict(after / before, added, cost)}",
    )


def _verdict(factor: float, added: float | None, cost: float | None) -> str:
    if factor < 1 / _NOTHING:
        return f"not worth their messages: without them a step is {1 / factor - 1:.1%} faster"
    if factor < _NOTHING:
        return "not worth their messages: without them a step takes as long"
    said = f"{factor - 1:+.1%} tokens/s"
    if added is None or cost is None:
        return said
    times = f", {added / cost:.2g} times as much" if added > cost else ""
    return f"{said} at {added:.4g} per million tokens; the others train at {cost:.4g}{times}"
