"""What the blocks of a residual network do: their Jacobians, how those align, and how classes collapse.

svd = jacobian_svd(step, step.input, k=30)            # top singular triplets, matrix-free
laws = alignment(model, images, classes=10)           # RA1 to RA4
laws.scalars(), laws.verdicts(), laws.table(), laws.figure()

Called, the package measures a network as the command does: `residua.anatomy("runs/a")`.
"""

import sys

from residua.callable import Command

from .alignment import Alignment, Block, measure, straightness
from .collapse import Collapse, neural_collapse
from .jacobian import JacobianSVD, NotDifferentiable, dense_jacobian, jacobian_svd
from .network import alignment
from .ujm import UJM, blobs, solve

__all__ = [
    "UJM",
    "Alignment",
    "Block",
    "Collapse",
    "JacobianSVD",
    "NotDifferentiable",
    "alignment",
    "blobs",
    "dense_jacobian",
    "jacobian_svd",
    "measure",
    "neural_collapse",
    "solve",
    "straightness",
]

sys.modules[__name__].__class__ = Command
