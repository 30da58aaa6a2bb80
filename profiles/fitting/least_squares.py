"""Non-negative least squares on relative residuals, and what the data cannot tell apart.

All fits of this package are sums of costs, ``seconds = sum of cost x amount``, with costs that cannot be negative.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import nnls

Floats = NDArray[np.float64]

#: A cost is told apart where at least this share of its amounts is not a mixture of the other amounts (each row
#: weighted by 1 / observed). Under a tenth, a few per cent of noise move it by its own size.
APART = 0.03
#: Residuals past this are weighed down (soft L1): a run that went wrong does not bend the others.
SCATTER = 0.03
#: Costs that no row tells apart share what they explain evenly: the smallest of the solutions, by this much.
SHRINK = 0.003


@dataclass(frozen=True, slots=True)
class Fit:
    """Costs by name, with their standard errors, and how far the fit is from each row.

    ``cost``: seconds a unit, 0 where the data want less than nothing. ``error``: one standard error, from the scatter
    of the rows; NaN where no row is left over. ``inside``: for a cost that could not be told apart, the costs it hides
    in. ``predicted_s``, ``observed_s``: by row.
    """

    cost: dict[str, float]
    error: dict[str, float]
    inside: dict[str, tuple[str, ...]]
    predicted_s: Floats
    observed_s: Floats

    @property
    def misses(self) -> Floats:
        """Relative residuals, ``predicted / observed - 1``, by row."""
        return self.predicted_s / self.observed_s - 1

    @property
    def rms(self) -> float:
        """Root mean square of the relative residuals."""
        return float(np.sqrt(np.mean(self.misses**2)))

    @property
    def worst(self) -> float:
        """Largest relative residual, as a size."""
        return float(np.abs(self.misses).max())


def tell_apart(
    amounts: Mapping[str, Floats], observed_s: Floats, apart: float = APART
) -> tuple[list[str], dict[str, tuple[str, ...]]]:
    """Return the costs that the rows can tell apart, in the order given, and for each other one where it hides.

    A cost is left out where its amounts are, within ``apart``, a mixture of those before it: then only the sum is
    known.
    """
    kept: list[str] = []
    inside: dict[str, tuple[str, ...]] = {}
    basis = np.zeros((observed_s.size, 0))
    for name, amount in amounts.items():
        column = amount / observed_s
        size = np.linalg.norm(column)
        if size == 0:
            inside[name] = ()
            continue
        column = column / size
        mixture = np.linalg.lstsq(basis, column, rcond=None)[0] if kept else np.zeros(0)
        if np.linalg.norm(column - basis @ mixture) < apart:
            inside[name] = tuple(k for k, part in zip(kept, mixture, strict=True) if abs(part) > 0.1)
            continue
        kept.append(name)
        basis = np.column_stack([basis, column])
    return kept, inside


def fit_costs(
    amounts: Mapping[str, Floats],
    observed_s: Floats,
    keep: Sequence[str] | None = None,
    trust: Floats | None = None,
    known_s: Floats | float = 0.0,
) -> Fit:
    """Fit ``observed_s = sum of cost x amount``: relative residuals, soft L1, no cost below zero.

    Parameters
    ----------
    amounts : mapping of name to array [rows]
        How much of each cost a row pays for, in order of precedence; see `tell_apart`.
    observed_s : array [rows]
        Seconds, above zero.
    keep : names, optional
        The costs to fit where that was settled before; otherwise those that the rows can tell apart.
    trust : array [rows], optional
        What a row's residual counts for, against 1.
    known_s : array [rows], optional
        Seconds of each row that are known already; the costs come on top.
    """
    inside: dict[str, tuple[str, ...]] = {}
    trust = np.ones_like(observed_s) if trust is None else trust
    if keep is None:
        keep, inside = tell_apart(amounts, observed_s)
    terms = np.column_stack([amounts[name] for name in keep])
    scale = np.linalg.norm(terms / observed_s[:, None], axis=0)
    weight, wanted = trust, 1 - known_s / observed_s
    found = np.zeros(len(keep))
    for _ in range(12):
        rows = terms / scale * (weight / observed_s)[:, None]
        found = nnls(
            np.vstack([rows, SHRINK * np.eye(len(keep))]), np.concatenate([weight * wanted, np.zeros(len(keep))])
        )[0]
        miss = terms / scale @ found / observed_s - wanted
        before, weight = weight, trust * (1 + (trust * miss / SCATTER) ** 2) ** -0.25
        if np.abs(weight - before).max() < 1e-3:
            break
    predicted = terms / scale @ found + known_s
    return Fit(
        cost={name: float(value) for name, value in zip(keep, found / scale, strict=True)},
        error=_errors(keep, terms * (trust / observed_s)[:, None], found / scale, trust * (predicted / observed_s - 1)),
        inside=inside,
        predicted_s=predicted,
        observed_s=observed_s,
    )


def _errors(names: Sequence[str], rows: Floats, found: Floats, misses: Floats) -> dict[str, float]:
    """Return standard errors of the costs above zero, by the usual formula; NaN for the others."""
    free = found > 0
    left = misses.size - int(free.sum())
    errors = np.full(found.size, np.nan)
    if left > 0 and free.any():
        variance = float(misses @ misses) / left
        spread = np.diag(np.linalg.pinv(rows[:, free].T @ rows[:, free]))
        errors[free] = np.sqrt(variance * np.maximum(spread, 0.0))
    return dict(zip(names, map(float, errors), strict=True))


def gain(before: Floats, after: Floats, costs: int) -> float:
    """Return by how much a richer fit is better: the fall of the squared residuals over the variance it leaves.

    ``costs``: of the richer fit. It is F times the costs added; 0 where no row is left over. No engine repeats itself
    better than to a per cent, so that smaller residuals count as one.
    """
    left = after.size - costs
    if left < 1:
        return 0.0
    return float((before @ before - after @ after) / max(float(after @ after) / left, 0.01**2))
