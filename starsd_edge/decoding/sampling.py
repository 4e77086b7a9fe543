"""The sampling rule: logits, settings, seed and position decide a token; nothing else does.

Plain decoding and verification both call `pick`, so drafting cannot change a text: it only changes how many
positions one forward settles. Greedy decoding is temperature 0.

A sampled pick is: penalties -> temperature -> top-k -> top-p -> min-p -> inverse CDF in token-id order, in
float64, at the uniform that `philox.uniform(seed, position)` gives. Among equal logits the lower token id
ranks higher, so every filter keeps a well-defined set.

**Margin.** A runtime whose rows are not bitwise equal to plain decoding's has logits that are off by at most
some eps. `Pick.margin` is a sound bound on how much that may be: *the token stays the same while every logit
moves by less than margin / 2.* With all |delta_i| <= eps:

* greedy: the order of two logits can change only when 2 eps >= their difference; margin = top1 - top2.
* the inverse CDF: a weight exp(z_i / T) changes by a factor within exp(-+ eps / T), so the odds F / (1 - F)
  of any CDF edge F change by at most exp(+-2 eps / T). Token j, F_(j-1) <= u < F_j, stays while
  2 eps < T min(logit F_j - logit u, logit u - logit F_(j-1)), logit being log-odds.
* top-k keeps its set while 2 eps < z_(k) - z_(k+1).
* top-p keeps the r best while their mass reaches p and the r - 1 best stay below it. The set of the r best is
  stable while 2 eps < z_(r) - z_(r+1); the mass of any r - 1 of them has odds of at most exp(2 eps / T) times
  those of the r - 1 best (the one left out weighs at least exp(-eps / T) times the least of them), so both
  conditions hold while 2 eps < T |logit C - logit p| for C = C_r and C_(r-1).
* min-p keeps its set while no score passes max + T log(min_p): 2 eps < the least distance to it.
* a repetition penalty r stretches a difference of logits by at most max(r, 1 / r).

The margin is the least of these. It is sound, not tight: a borderline token of tiny mass counts in full.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from starsd_edge.decoding.philox import uniform
from starsd_edge.errors import BundleError, UsageError
from starsd_edge.types import Float32Array, Float64Array, TokenArray

__all__ = ["Pick", "SamplingParams", "pick", "token_law"]

IdArray: TypeAlias = NDArray[np.int64]

MAX_SEED = 2**64 - 1
# A token this many nats below the best has less than 2**-64 of its probability: a uniform of 53 bits cannot
# resolve it, and leaving it out spares the exponentials of most of a large vocabulary.
NEGLIGIBLE_NATS = 64 * math.log(2)
# Cumulative sums over 152,000 float64 terms may be off by V * 2**-53; a decision closer than that to an edge
# has no margin at all.
CDF_ROUNDING = 1e-10
# Selection of the best m of V looks at the maxima of blocks of this many logits first.
BLOCK = 64
# top-p sorts tokens into bins of score first: this many a nat, and everything below the last in the last.
BINS_PER_NAT = 8
NUM_BINS = 512


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How a token follows from logits. Raises UsageError for values that make no sense.

    temperature         0 is greedy; then the filters have no effect, the penalties do
    top_k               keep the k likeliest; 0 keeps all
    top_p               keep the likeliest that together reach this probability; 1 keeps all
    min_p               keep tokens with at least this fraction of the best one's probability; 0 keeps all
    repetition_penalty  logits of tokens seen so far: divided if positive, multiplied if not; 1 is none
    presence_penalty    taken off a token's logit once it has been seen
    frequency_penalty   taken off a token's logit for each time it has been seen
    seed                0 to 2**64 - 1; with the same seed the same text
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        limits: tuple[tuple[str, float, float, float], ...] = (
            ("temperature", self.temperature, 0.0, 100.0),
            ("top_k", self.top_k, 0, 2**31 - 1),
            ("top_p", self.top_p, 1e-6, 1.0),
            ("min_p", self.min_p, 0.0, 1.0),
            ("repetition_penalty", self.repetition_penalty, 0.01, 100.0),
            ("presence_penalty", self.presence_penalty, -100.0, 100.0),
            ("frequency_penalty", self.frequency_penalty, -100.0, 100.0),
            ("seed", self.seed, 0, MAX_SEED),
        )
        for name, value, low, high in limits:
            if not low <= value <= high:
                raise UsageError(f"{name} must be between {low:g} and {high:g}, not {value}")

    @property
    def penalised(self) -> bool:
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0


@dataclass(frozen=True, slots=True)
class Pick:
    """A decided token. It would stay the same while every logit moved by less than margin / 2."""

    token: int
    margin: float


def pick(
    logits: Float32Array, params: SamplingParams, position: int, context: Sequence[int] | TokenArray
) -> Pick:
    """The token at absolute `position`.

    logits   float32 [V]; NaN counts as minus infinity
    context  every token before `position`; only penalties look at it

    Raises BundleError when no logit is a number.
    """
    logits = _finite(logits, position)
    stretch = 1.0
    if params.penalised:
        logits = _penalise(logits, params, context)
        stretch = max(params.repetition_penalty, 1.0 / params.repetition_penalty)
    if params.temperature == 0.0:
        found = _greedy(logits)
    else:
        found = _sample(logits, params, uniform(params.seed, position))
    return found if stretch == 1.0 else Pick(found.token, found.margin / stretch)


def token_law(
    logits: Float32Array, params: SamplingParams, context: Sequence[int] | TokenArray = ()
) -> Float64Array:
    """float64 [V]: the probability with which `pick` takes each token. For tests and calibration."""
    logits = _finite(logits, 0)
    if params.penalised:
        logits = _penalise(logits, params, context)
    law = np.zeros(len(logits), np.float64)
    if params.temperature == 0.0:
        law[_greedy(logits).token] = 1.0
        return law
    kept = _keep(logits, params)
    law[kept.ids] = kept.weights / kept.weights.sum()
    return law


def _finite(logits: Float32Array, position: int) -> Float32Array:
    best = logits.max()
    if math.isfinite(best):
        return logits
    # A half-precision target may overflow. NaN and infinities must not decide a token silently.
    cleaned: Float32Array = np.where(np.isfinite(logits), logits, -np.inf).astype(np.float32)
    if not math.isfinite(cleaned.max()):
        raise BundleError(
            f"the target's logits at position {position} hold no number (overflow in half precision?): "
            "export the bundle with another --quant, or run its self-test with `starsd doctor`"
        )
    return cleaned


def _penalise(
    logits: Float32Array, params: SamplingParams, context: Sequence[int] | TokenArray
) -> Float32Array:
    seen, counts = np.unique(np.asarray(context, np.int64), return_counts=True)
    penalised: Float32Array = logits.copy()
    values = penalised[seen]
    penalty = np.float32(params.repetition_penalty)  # CTRL, arXiv 1909.05858, equation 2
    values = np.where(values > 0, values / penalty, values * penalty)
    values -= np.float32(params.presence_penalty) + np.float32(params.frequency_penalty) * counts.astype(
        np.float32
    )
    penalised[seen] = values
    return penalised


def _greedy(logits: Float32Array) -> Pick:
    token = int(logits.argmax())  # the first among equals
    rest = [part.max() for part in (logits[:token], logits[token + 1 :]) if len(part)]
    margin = _difference(float(logits[token]), float(max(rest))) if rest else math.inf
    return Pick(token, margin)


@dataclass(frozen=True, slots=True)
class _Kept:
    """What the filters leave.

    ids      int64 [K], rising
    weights  float64 [K], relative to the best token's 1
    margin   twice the logit noise under which the filters keep this very set
    """

    ids: IdArray
    weights: Float64Array
    margin: float


def _sample(logits: Float32Array, params: SamplingParams, u: float) -> Pick:
    kept = _keep(logits, params)
    cdf = np.cumsum(kept.weights)
    total = float(cdf[-1])
    index = min(int(np.searchsorted(cdf, u * total, side="right")), len(cdf) - 1)
    above = float(cdf[index]) / total
    below = float(cdf[index - 1]) / total if index else 0.0
    margin = params.temperature * min(_log_odds_gap(above, u), _log_odds_gap(u, below))
    return Pick(int(kept.ids[index]), min(margin, kept.margin))


def _keep(logits: Float32Array, params: SamplingParams) -> _Kept:
    """Apply the filters; temperature is in the weights."""
    best = float(logits.max())
    margin = math.inf
    ids: IdArray
    if 0 < params.top_k < len(logits):
        ranked = _ranked(logits, params.top_k + 1)
        margin = _difference(float(logits[ranked[-2]]), float(logits[ranked[-1]]))
        ids = ranked[:-1]
        scores = logits[ids].astype(np.float64)
    else:
        ids, scores = np.arange(len(logits)), logits.astype(np.float64)
    weights = np.exp((scores - best) / params.temperature)
    if params.top_p < 1.0:
        chosen, gap = _nucleus(scores, weights, params)
        ids, scores, weights, margin = ids[chosen], scores[chosen], weights[chosen], min(margin, gap)
    if params.min_p > 0.0:
        distance = scores - best - params.temperature * math.log(params.min_p)
        chosen = np.flatnonzero(distance >= 0.0)
        distance[distance.argmax()] = math.inf  # the best token cannot fall below itself
        margin = min(margin, float(np.abs(distance).min()))
        ids, weights = ids[chosen], weights[chosen]
    significant = np.flatnonzero(weights >= math.exp(-NEGLIGIBLE_NATS))
    ids, weights = ids[significant], weights[significant]
    if len(ids) > 1 and (params.top_k > 0 or params.top_p < 1.0):
        order = np.argsort(ids)
        ids, weights = ids[order], weights[order]
    return _Kept(ids, weights, margin)


def _nucleus(scores: Float64Array, weights: Float64Array, params: SamplingParams) -> tuple[IdArray, float]:
    """Indices of the least set of best tokens whose mass reaches top_p, and its margin.

    Only the bin of scores in which the mass is reached gets sorted: a flat law's nucleus holds most tokens.
    """
    bins = np.minimum((scores.max() - scores) * (BINS_PER_NAT / params.temperature), NUM_BINS - 1)
    bins_of = bins.astype(np.int32)
    mass = np.cumsum(np.bincount(bins_of, weights, NUM_BINS))
    wanted = params.top_p * float(mass[-1])
    edge = int(np.searchsorted(mass, wanted, side="left"))
    before = float(mass[edge - 1]) if edge else 0.0
    inside = np.flatnonzero(bins_of == edge)
    inside = inside[np.argsort(-scores[inside], kind="stable")]
    reached = before + np.cumsum(weights[inside])
    count = min(int(np.searchsorted(reached, wanted, side="left")) + 1, len(inside))
    last = inside[count - 1]
    chosen = np.concatenate([np.flatnonzero(bins_of < edge), inside[:count]])

    left_out = inside[count:] if count < len(inside) else np.flatnonzero(bins_of > edge)
    margin = math.inf
    if len(left_out):
        margin = _difference(float(scores[last]), float(scores[left_out].max()))
    total = float(mass[-1])
    with_last = float(reached[count - 1]) / total
    without_last = with_last - float(weights[last]) / total
    gap = min(_log_odds_gap(with_last, params.top_p), _log_odds_gap(params.top_p, without_last))
    return chosen, min(margin, params.temperature * gap)


def _ranked(scores: Float32Array | Float64Array, count: int) -> IdArray:
    """Indices of the `count` best scores, best first, the lower index first among equals."""
    candidates: IdArray
    blocks = len(scores) // BLOCK
    if count < blocks:
        # At least `count` scores reach the count-th largest block maximum: only those can be among the best.
        maxima = scores[: blocks * BLOCK].reshape(blocks, BLOCK).max(axis=1)
        floor = np.partition(maxima, blocks - count)[blocks - count]
        candidates = np.flatnonzero(scores >= floor)
    else:
        candidates = np.arange(len(scores))
    order = np.argsort(-scores[candidates], kind="stable")
    return candidates[order[:count]]


def _log_odds_gap(upper: float, lower: float) -> float:
    """logit(upper) - logit(lower) less what rounding may add, at least 0; infinite at the ends of [0, 1]."""
    if upper >= 1.0 or lower <= 0.0:
        return math.inf
    upper -= CDF_ROUNDING
    if upper <= lower:
        return 0.0
    return math.log(upper) - math.log1p(-upper) - math.log(lower) + math.log1p(-lower)


def _difference(better: float, worse: float) -> float:
    """better - worse; infinite where the worse is impossible."""
    return math.inf if worse == -math.inf else better - worse
