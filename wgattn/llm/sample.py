"""Choosing the next token from logits."""

import math
import sys

import numpy as np

from ..attention.arguments import finite, whole
from ..errors import ArgumentError, ShapeError


def sample(logits: np.ndarray, *, temperature: float = 0.0, top_k: int = 0, top_p: float = 1.0, rng: np.random.Generator | None = None) -> int:
    """The id of the next token, drawn from `logits` (vocab,).

    temperature: 0 takes the largest logit, on a tie the lowest id; else the logits are divided by it before the softmax.
    top_k: only the k most likely tokens take part; 0 means all. Ties at the border fall to the lowest ids.
    top_p: of those, only the smallest set whose probability reaches top_p, at least one token; in (0, 1].
    rng: where the draw comes from; None makes one from fresh entropy.

    The softmax runs in float64. ArgumentError: a negative or infinite temperature, a negative top_k, top_p outside (0, 1], NaN among the logits or
    nothing but -inf. ShapeError (an ArgumentError): logits that are not one non-empty row.
    """
    logits = np.asarray(logits)
    check_options(temperature, top_k, top_p)
    _check_logits(logits)
    if temperature == 0:
        return int(np.argmax(logits))
    logits = logits.astype(np.float64)
    ids = np.arange(logits.size)
    if 0 < top_k < logits.size:
        ids = _largest(logits, top_k)
    weights = _softmax(logits[ids], temperature)
    if top_p < 1:
        reached = np.cumsum(np.sort(weights)[::-1])
        kept = _largest(logits[ids], min(int(np.searchsorted(reached, top_p)) + 1, weights.size))  # not by weights: those round to equals
        ids, weights = ids[kept], weights[kept]
    steps = np.cumsum(weights)
    draw = (rng or np.random.default_rng()).random() * steps[-1]
    return int(ids[np.searchsorted(steps, draw, side="right")])


def check_options(temperature: float, top_k: int, top_p: float) -> None:
    """ArgumentError, TypeError for options of `sample` that cannot be."""
    if finite("temperature", temperature) < 0:
        raise ArgumentError(f"temperature is {temperature}: it must be 0 (greedy) or a positive finite number")
    whole("top_k", top_k, 0, sys.maxsize)  # 0: all tokens
    if not 0 < finite("top_p", top_p) <= 1:
        raise ArgumentError(f"top_p is {top_p}: it must be above 0 and at most 1")


def _check_logits(logits: np.ndarray) -> None:
    if logits.ndim != 1 or logits.size == 0:
        raise ShapeError(f"logits have the shape {logits.shape}: pass one row of shape (vocab,)")
    top = logits.max()  # NaN wins every maximum
    if np.isnan(top):
        wrong = np.flatnonzero(np.isnan(logits))
        raise ArgumentError(f"{wrong.size} of {logits.size} logits are NaN (the first is number {wrong[0]}): the step that computed them failed")
    if top == -math.inf:
        raise ArgumentError(f"all {logits.size} logits are -inf: leave at least one token possible")


def _softmax(logits: np.ndarray, temperature: float) -> np.ndarray:
    top = logits.max()
    with np.errstate(all="ignore"):  # +inf less itself is NaN, unused; a huge quotient is -inf, and its weight 0
        weights = np.exp(np.where(logits == top, 0.0, (logits - top) / temperature))
    return weights / weights.sum()


def _largest(values: np.ndarray, count: int) -> np.ndarray:
    """Indices of the `count` largest values, in ascending order; ties at the border fall to the lowest indices."""
    border = np.partition(values, values.size - count)[values.size - count]
    kept = values > border
    ties = np.flatnonzero(values == border)
    kept[ties[: count - np.count_nonzero(kept)]] = True
    return np.flatnonzero(kept)
