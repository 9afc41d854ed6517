"""Array annotations and the letters used in them, listed once.

B batch (sessions)      T new tokens or frames    S cache slots            L layers
N query heads           K key/value heads         H head width             G query heads per key/value head
D model width           F feed-forward width      V vocabulary rows        C mel bins or codes
P patches of a slice    Q resampler queries       U units                  M rows of a media table

Annotations document; they are not checked at run time: `Float[Array, "b t d"]`.
"""

from jax import Array
from jaxtyping import Bool, Float, Int, PyTree

Params = PyTree  # nested dict of arrays, layers stacked on a leading axis; documented in docs/params.md

__all__ = ["Array", "Bool", "Float", "Int", "Params", "PyTree"]
