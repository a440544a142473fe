"""What the blocks of a residual network do: Jacobians and their alignment."""

from .jacobian import JacobianSVD, NotDifferentiable, dense_jacobian, jacobian_svd

__all__ = ["JacobianSVD", "NotDifferentiable", "dense_jacobian", "jacobian_svd"]
