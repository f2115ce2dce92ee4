"""Hadamard matrices, made as their discoverers did, and rows times them in float64."""

from __future__ import annotations

from functools import cache

import numpy as np


@cache
def sylvester(n: int) -> np.ndarray:
    i = np.arange(n)
    both = i[:, None] & i
    parity = np.zeros_like(both)
    while both.any():
        parity ^= both & 1
        both >>= 1
    return 1 - 2 * parity


def legendre(q: int) -> np.ndarray:
    """Quadratic character of j - i."""
    values = -np.ones(q, int)
    values[np.arange(1, q) ** 2 % q] = 1
    values[0] = 0
    i = np.arange(q)
    return values[(i - i[:, None]) % q]


def paley_1(q: int) -> np.ndarray:
    """Of order q + 1, normalised as 40's has it: the first row is minus, but for its first element."""
    h = np.ones((q + 1, q + 1), int)
    h[0, 1:] = -1
    h[1:, 1:] = np.eye(q, dtype=int) - legendre(q)
    return h


def paley_2(q: int) -> np.ndarray:
    """Of order 2 (q + 1)."""
    conference = np.ones((q + 1, q + 1), int)
    conference[0, 0] = 0
    conference[1:, 1:] = legendre(q)
    both = np.array([[1, 1], [1, -1]])
    return np.kron(conference, both) + np.kron(np.eye(q + 1, dtype=int), [[1, -1], [-1, -1]])


def williamson(*signs: str) -> np.ndarray:
    """Sixteen circulant blocks, four a line, by their first rows."""

    def circulant(first: str) -> np.ndarray:
        row = np.array([1 if c == "+" else -1 for c in first])
        i = np.arange(len(row))
        return row[(i - i[:, None]) % len(row)]

    return np.block([[circulant(first) for first in line.split()] for line in signs])


ORDERS = {
    1: np.ones((1, 1), int),
    12: paley_2(5),
    20: williamson(
        "+---- +---- ++--+ +-++-", "-++++ +---- -+--+ ++--+", "--++- +-++- +---- -++++", "-+--+ --++- +---- +----"
    ),
    28: williamson(
        "+------ ++----+ +-+--+- +--++--",
        "--++++- +------ -++--++ +-+--+-",
        "-+-++-+ +--++-- +------ --++++-",
        "-++--++ -+-++-+ ++----+ +------",
    ),
    40: np.kron(sylvester(2), paley_1(19)),
}


def transform(x: np.ndarray) -> np.ndarray:
    n = x.shape[-1]
    order = next(m for m in (1, 40, 28, 20, 12) if n % m == 0 and (n // m) & (n // m - 1) == 0)
    power = n // order
    half = 1 << power.bit_length() // 2  # the matrix of a product is Kronecker's, and that of 32768 would be 8 GB
    parts = x.astype(np.float64).reshape(*x.shape[:-1], order, power // half, half)
    rows = (sylvester(power // half) @ parts @ sylvester(half)).reshape(*x.shape[:-1], order, power)
    return (ORDERS[order] @ rows / np.sqrt(n)).reshape(x.shape)
