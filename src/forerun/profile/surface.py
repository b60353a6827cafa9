"""A polynomial surface through measured speeds, and its peak."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np


class SurfacePeak(NamedTuple):
    degree: int  # of the polynomial
    block: int
    candidates: int


class Measured(NamedTuple):
    """One measured point of the surface."""

    block: int
    candidates: int
    speed: float


def surface_peak(points: Sequence[Measured], most: int = 6) -> SurfacePeak:
    """The degree, at most `most`, of the polynomial in (log2 block, candidates) that foretells
    left-out points best, and where it is highest."""
    blocks = np.array([point.block for point in points])
    candidates = np.array([point.candidates for point in points], float)
    speeds = np.array([point.speed for point in points], float)
    x = np.log2(blocks)
    degrees = [d for d in range(1, most + 1) if (d + 1) * (d + 2) // 2 < len(points)] or [1]
    degree = min(degrees, key=lambda d: _left_out_error(x, candidates, speeds, d))
    weights = _fit(x, candidates, speeds, degree)
    grid = [
        (b, c)
        for b in range(int(blocks.min()), int(blocks.max()) + 1)
        for c in range(int(candidates.min()), int(candidates.max()) + 1)
    ]
    grid_x = np.log2([b for b, _ in grid])
    grid_y = np.array([c for _, c in grid], float)
    height = _terms(grid_x, grid_y, degree) @ weights
    block, count = grid[int(height.argmax())]
    return SurfacePeak(degree, block, count)


def _terms(x: np.ndarray, y: np.ndarray, degree: int) -> np.ndarray:
    """All monomials up to a degree, one column each."""
    powers = [(i, j) for i in range(degree + 1) for j in range(degree + 1 - i)]
    return np.stack([x**i * y**j for i, j in powers], 1)


def _fit(x: np.ndarray, y: np.ndarray, z: np.ndarray, degree: int) -> np.ndarray:
    return np.linalg.lstsq(_terms(x, y, degree), z, rcond=None)[0]


def _left_out_error(x: np.ndarray, y: np.ndarray, z: np.ndarray, degree: int) -> float:
    """The mean squared error at each point of the surface through all the others."""
    errors = []
    for i in range(len(z)):
        others = np.arange(len(z)) != i
        weights = _fit(x[others], y[others], z[others], degree)
        [predicted] = _terms(x[i : i + 1], y[i : i + 1], degree) @ weights
        errors.append(float(predicted - z[i]) ** 2)
    return statistics.mean(errors)
