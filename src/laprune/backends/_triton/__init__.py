"""The solver and its gradient in Triton. ``reference`` explains the mathematics in the same words.

A program holds ROWS short rows, or a part of one long row that a team of programs solves together.
It walks over its scores in tiles of four dimensions, LANES, ROWS, U and 4: a thread has U times
four neighbouring scores of one row, and sums them up alone. Every pass reads the scores again,
from the cache if they fit there; rows of a single tile stay in registers. What belongs to a row is
a vector ``[ROWS]``, or a scalar if ROWS is one, of the type T of the scores (float32 for half
types). A program adds in T, a team in float64 and in the order of its programs.

The exponent is kept in base two: ``y = z log2(e)``, and ``e = 2^-|y| = 2 q``.

Triton compiles these functions from their source: their arguments have no Python types. From the
ground up: ``tiles``, ``team``, ``sums``, ``start`` and ``step``, ``endpoints``, and the kernels in
``forward`` and ``backward``.
"""

from .backward import vjp
from .forward import solve_long, solve_rows

__all__ = ["solve_long", "solve_rows", "vjp"]
