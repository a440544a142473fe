"""Top singular triplets of residual Jacobians, without ever forming the Jacobian.

The Jacobian of a batch map at a batch is one matrix per sample, and samples do not mix: one forward-mode product
applies all of them to one vector each, one reverse-mode product all transposes. `vmap` runs over probe vectors only.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from residua.nn.stream import Step
from residua.room import memory

from .lanczos import Operator, lanczos

Map = Callable[[Tensor], Tensor]
Method = Literal["auto", "dense", "formed", "lanczos"]

DENSE_ENTRIES = 2**23  # of one sample's Jacobian; 2,048 x 2,048 is half of it
DENSE_SIDE = 400  # below, a full decomposition is quicker than finding some of it
_WORKING_COPIES = 16  # of a probe and its image, that a chunk of products may take on the way
_INNER_COPIES = 6  # of the largest tensor on the way

_PATIENCE = 200  # rounds of Lanczos on a formed matrix before it is decomposed instead


class NotDifferentiable(ValueError):
    """A map whose derivative does not exist, or does not depend on its input."""


@dataclass(frozen=True)
class JacobianSVD:
    """`J v_i = s_i u_i` and `J^T u_i = s_i v_i` for every sample, largest first."""

    U: Tensor
    """(B, k, *output shape), unit vectors."""
    S: Tensor
    """(B, k), descending."""
    V: Tensor
    """(B, k, *input shape), unit vectors; signs go with U's."""
    residual: Tensor
    """(B, k): the larger of |J v - s u| and |J^T u - s v|."""
    converged: Tensor
    """(B, k): whether the residual is within ten times `tol` of the largest singular value."""
    method: str
    rounds: int
    """Of products with J and J^T; 0 for a full decomposition."""


def jacobian_svd(
    f: Map,
    x: Tensor,
    k: int,
    *,
    method: Method = "auto",
    tol: float | None = None,
    rounds: int = 1500,
    budget: float = 2.0,
    seed: int = 0,
) -> JacobianSVD:
    """The `k` largest singular triplets of `d f(x)_b / d x_b` for every sample b of a batch.

    `f` maps a batch (B, ...) to a batch (B, ...) sample by sample: evaluation mode, no batch statistics. Of a residual
    step it is what the step adds to its shortcut, see `residual_branch`. Shapes of input and output may differ.
    Precision is that of `x`: use float64 where a rank is claimed.

    "lanczos" is block Golub-Kahan-Lanczos with full re-orthogonalisation and thick restarts, on the map made linear
    once. It goes on until all residuals `J^T u - s v` are within `tol` of the largest singular value (default 1e-9 in
    float64, 1e-5 in float32), or `rounds` products of four vectors each were made. "dense" forms the Jacobian and
    decomposes it; "formed" forms it and uses Lanczos on the matrix, and decomposes it where that does not converge. By
    itself it takes "dense" for a few hundred dimensions, "formed" up to about 2,900, and "lanczos", which needs no
    matrix, beyond. Judge by `converged`, not by the count: where s_k is close to s_{k+1} the last vectors are nearly
    undefined. `budget` in GiB bounds the memory of one chunk of products; beside it "lanczos" keeps 160, or 8 k,
    vectors of both sides for every sample.

    >>> svd = jacobian_svd(step, step.input, k=30)
    >>> svd.S[0], svd.residual.max()
    """
    if x.ndim < 2 or len(x) == 0:
        raise ValueError(f"x of shape {tuple(x.shape)} given; expected a batch (B, ...) of at least one sample")
    if not x.dtype.is_floating_point or x.dtype in (torch.float16, torch.bfloat16):
        raise ValueError(f"x is {x.dtype}; Jacobians need float32 or float64")
    if budget <= 0:
        raise ValueError(f"a budget of {budget:g} GiB was given; it must be positive")
    products = Products(f, x, budget)
    m, n = products.out_size, products.in_size
    if not 1 <= k <= min(m, n):
        raise ValueError(f"k = {k} triplets of a {m} x {n} Jacobian were asked for; choose 1 to {min(m, n)}")
    if method not in get_args(Method):
        raise ValueError(f"method is {method!r}; choose one of {', '.join(get_args(Method))}")
    if method == "auto":
        method = _choose(m, n, k)
    tol = tol if tol is not None else (1e-9 if x.dtype == torch.float64 else 1e-5)
    with says_what_to_do(budget, len(x)), exact():
        if method == "lanczos":
            products.linearize()
        operator = products if method == "lanczos" else Matrices(_full(products))
        if method == "dense":
            (u, s, v), used = operator.decompose(k), 0  # type: ignore[union-attr]
        else:
            u, s, v, used = lanczos(operator, k, tol, rounds if method == "lanczos" else _PATIENCE, seed)
        residual = _residual(operator, u, s, v, tol)
        if method == "formed" and bool((residual > 10 * tol * s[:, :1]).any()):
            (u, s, v), used = operator.decompose(k), 0  # type: ignore[union-attr]
            residual = _residual(operator, u, s, v, tol)
        if not s.any():
            _refuse_detached(products.f, x)
    converged = residual <= 10 * tol * s[:, :1]
    return JacobianSVD(products.outputs(u), s, products.inputs(v), residual, converged, method, used)


def residual_branch(step: Step) -> Map:
    """What a step adds to its shortcut: the branch, of `relu(alpha shortcut(x) + F(x))` where the sum is positive."""
    if step.after is None:
        return step.branch
    if step.after is not F.relu and not isinstance(step.after, nn.ReLU):
        raise ValueError(
            f"{step.name}: its sum passes through a norm or the like (post-norm); measured are Jacobians of blocks "
            "x + F(x) and relu(x + F(x))"
        )

    def masked(x: Tensor) -> Tensor:
        f = step.branch(x)
        kept = x if step.shortcut is None else step.shortcut(x)
        return f * (step.alpha * kept + f > 0)

    return masked


def _choose(m: int, n: int, k: int) -> Method:
    if 4 * k >= min(m, n) or (min(m, n) < DENSE_SIDE and m * n <= DENSE_ENTRIES):
        return "dense"
    return "formed" if m * n <= DENSE_ENTRIES else "lanczos"


class Matrices:
    """Jacobians (B, out, in) that were formed."""

    def __init__(self, x: Tensor) -> None:
        self.x = x
        self.out_size, self.in_size = x.shape[1:]

    def push(self, v: Tensor) -> Tensor:
        return v @ self.x.mT

    def pull(self, u: Tensor) -> Tensor:
        return u @ self.x

    def decompose(self, k: int) -> tuple[Tensor, Tensor, Tensor]:
        u, s, vh = torch.linalg.svd(self.x, full_matrices=False)
        return u.mT[:, :k].contiguous(), s[:, :k].contiguous(), vh[:, :k].contiguous()


class _Sizes(TorchDispatchMode):
    """Remembers how large results get."""

    largest = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.largest = max(self.largest, *(y.numel() for y in tree_leaves(result) if isinstance(y, Tensor)), 0)
        return result


class Products:
    """J and J^T of a map at a batch, in chunks of vectors that fit a budget."""

    def __init__(self, f: Map, x: Tensor, budget: float = 2.0) -> None:
        f = residual_branch(f) if isinstance(f, Step) else f
        self.x = x.detach()
        self.budget = budget
        with exact(), torch.no_grad():  # nothing is kept for the weights
            try:
                with says_what_to_do(budget, len(x)):
                    out, pull = torch.func.vjp(f, self.x)[:2]
            except torch.OutOfMemoryError:
                raise
            except (RuntimeError, NotImplementedError) as error:
                hint = " (in evaluation mode? call model.eval())" if "mutate a captured" in str(error) else ""
                raise NotDifferentiable(f"the map cannot be differentiated: {error}{hint}") from error
        self._pull = pull
        if not isinstance(out, Tensor):
            raise ValueError(f"the map returned a {type(out).__name__}; it must return one tensor")
        if not (x.isfinite().all() and out.isfinite().all()):
            raise ValueError("the map's input or output is not finite: are there NaN in the weights or images?")
        if out.ndim == 0 or out.shape[0] != len(x):
            raise ValueError(f"the map turned a batch of {len(x)} into {tuple(out.shape)}; it must keep the batch")
        self.f = f
        self.shape = out.shape[1:]
        self.in_size, self.out_size = math.prod(x.shape[1:]), math.prod(self.shape)
        again, largest = self._again()
        if (again - out).norm() > 0.01 * out.norm():
            raise ValueError("the map gives another output each time: put it in evaluation mode, without dropout")
        self._check_samples(out)
        each = max(_WORKING_COPIES * len(x) * (self.in_size + self.out_size), _INNER_COPIES * largest)
        self.chunk = max(1, int(budget * 2**30 / (each * x.element_size())))
        self.forward_mode = self._try_forward_mode()
        self._linear: Map | None = None

    def _again(self) -> tuple[Tensor, int]:
        """The output once more, and the numbers in the largest tensor on the way to it, which may be more than those
        of the part that is measured."""
        sizes = _Sizes()
        with exact(), torch.no_grad(), sizes:
            return self.f(self.x), sizes.largest

    def _check_samples(self, out: Tensor) -> None:
        """Refuse a derivative that does not exist here, or that of one sample's output by another sample."""
        probe = torch.zeros_like(out)
        probe[0] = torch.randn(out.shape[1:], generator=torch.Generator().manual_seed(0), dtype=torch.float64).to(out)
        with exact(), torch.no_grad(), says_what_to_do(self.budget, len(out)):
            back = self._pull(probe)[0]
        if not back.isfinite().all():
            raise ValueError("the map's derivative is not finite here: there is no Jacobian to measure")
        if back[1:].norm() > 1e-5 * back[0].norm():
            raise ValueError("the map mixes the samples of a batch: is batch norm in training mode? call model.eval()")

    def _try_forward_mode(self) -> bool:
        """Fused kernels and custom functions may have no forward-mode derivative; the reverse mode twice does it."""
        try:
            with exact(), torch.no_grad(), warnings.catch_warnings():
                warnings.filterwarnings("ignore", message=".*torch.jit.script")  # torch tells itself
                torch.func.jvp(self.f, (self.x,), (torch.zeros_like(self.x),))
        except (RuntimeError, NotImplementedError) as error:
            reason = (str(error) or type(error).__name__).splitlines()[0]
            text = f"no forward-mode derivative, so products with J go by the reverse mode twice, slower: {reason}"
            warnings.warn(text, stacklevel=4)
            return False
        return True

    def linearize(self) -> None:
        """Keep what products with J need of f at x, instead of computing it anew for each: worth it for many."""
        if not self.forward_mode:
            return
        with exact(), torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about constants that tracing folds
            try:
                linear = torch.func.linearize(self.f, self.x)[1]
                v = torch.randn(self.x.shape, generator=torch.Generator().manual_seed(0)).to(self.x)
                torch.vmap(linear, in_dims=1)(v[:, None])  # some graphs cannot be mapped over probes
                again, plain = linear(v), torch.func.jvp(self.f, (self.x,), (v,))[1]
            except torch.OutOfMemoryError:
                raise
            except Exception:  # whatever tracing does not support: the plain product serves
                return
        # what f changes in place is a constant of the graph, and changes with every call of it
        if (again - plain).norm() <= torch.finfo(v.dtype).eps ** 0.5 * plain.norm():
            self._linear = linear

    def outputs(self, u: Tensor) -> Tensor:
        return u.reshape(*u.shape[:2], *self.shape)

    def inputs(self, v: Tensor) -> Tensor:
        return v.unflatten(-1, self.x.shape[1:])

    def push(self, v: Tensor) -> Tensor:
        """J v: (B, p, in) -> (B, p, out)."""
        return self._chunked(self._push_one, self.inputs(v)).reshape(*v.shape[:2], self.out_size)

    def pull(self, u: Tensor) -> Tensor:
        """J^T u: (B, p, out) -> (B, p, in)."""
        return self._chunked(lambda one: self._pull(one)[0], self.outputs(u)).flatten(2)

    def _push_one(self, v: Tensor) -> Tensor:
        if self._linear is not None:
            return self._linear(v)
        if self.forward_mode:
            return torch.func.jvp(self.f, (self.x,), (v,))[1]
        # J^T u is linear in u, so its own transpose, taken at any u, is J
        zero = torch.zeros(len(v), *self.shape, dtype=v.dtype, device=v.device)
        return torch.func.vjp(lambda u: self._pull(u)[0], zero)[1](v)[0]

    def _chunked(self, product: Map, vectors: Tensor) -> Tensor:
        plain = torch.autocast(vectors.device.type, enabled=False)
        with exact(), torch.no_grad(), plain, says_what_to_do(self.budget, len(self.x)):
            return torch.vmap(product, in_dims=1, chunk_size=self.chunk)(vectors).movedim(0, 1)


def _residual(operator: Operator, u: Tensor, s: Tensor, v: Tensor, tol: float) -> Tensor:
    """(B, k) larger of |J v - s u| and |J^T u - s v|; only the first where s is zero within `tol`."""
    right = (operator.push(v) - s[..., None] * u).norm(dim=-1)
    left = (operator.pull(u) - s[..., None] * v).norm(dim=-1)
    return torch.maximum(right, torch.where(s <= tol * s[:, :1], right, left))


def _refuse_detached(f: Map, x: Tensor) -> None:
    """A derivative that is zero everywhere is an error where the map does depend on its input."""
    with torch.no_grad():
        here = f(x)
        moved = f(1.1 * x + 0.1)
    if here.any() and not torch.equal(here, moved):
        raise NotDifferentiable(
            "the derivative is zero although the output changes with the input: is something detached or rounded?"
        )


@contextmanager
def says_what_to_do(budget: float, samples: int) -> Iterator[None]:
    """Turns running out of memory, on any device, into a sentence that names the budget."""
    try:
        yield
    except RuntimeError as error:
        known = "GiB for products" in str(error) or "GiB in full" in str(error)
        if known or not (isinstance(error, torch.OutOfMemoryError) or "can't allocate memory" in str(error)):
            raise
        raise torch.OutOfMemoryError(
            f"out of memory with {samples} samples and a budget of {budget:g} GiB for products: lower the budget, or "
            "give fewer samples or triplets"
        ) from error


@contextmanager
def exact() -> Iterator[None]:
    """Attention by plain operations (fused kernels have no forward-mode derivative), and products in full precision."""
    products, convolutions = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    fused = torch.backends.mha.get_fastpath_enabled()  # whole encoder layers of torch.nn, in evaluation
    torch.set_float32_matmul_precision("highest")
    torch.backends.cudnn.allow_tf32 = False
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with sdpa_kernel(SDPBackend.MATH):
            yield
    finally:
        torch.set_float32_matmul_precision(products)
        torch.backends.cudnn.allow_tf32 = convolutions
        torch.backends.mha.set_fastpath_enabled(fused)


def dense_jacobian(f: Map, x: Tensor, budget: float = 2.0) -> Tensor:
    """(B, out, in): every sample's Jacobian in full; columns by forward or rows by reverse mode, the fewer.

    `f` as in `jacobian_svd`.
    """
    return _full(Products(f, x, budget))


def formed_for(products: Products, vectors: int) -> Operator:
    """The Jacobians as matrices where these are small and cost less than products with so many vectors."""
    m, n = products.out_size, products.in_size
    if min(m, n) <= vectors and m * n <= DENSE_ENTRIES:
        return Matrices(_full(products))
    products.linearize()
    return products


def _full(products: Products) -> Tensor:
    x, (m, n) = products.x, (products.out_size, products.in_size)
    needed = x.element_size() * (len(x) * m * n + min(m, n) ** 2)
    if needed > memory(x.device):
        raise torch.OutOfMemoryError(
            f"{len(x)} Jacobians of {m:,} x {n:,} take {needed / 2**30:,.0f} GiB in full, more than there is: use "
            "method lanczos, or give fewer samples or triplets"
        )
    if n <= m:
        eye = torch.eye(n, dtype=x.dtype, device=x.device).expand(len(x), n, n)
        return products.push(eye).mT
    eye = torch.eye(m, dtype=x.dtype, device=x.device).expand(len(x), m, m)
    return products.pull(eye)
