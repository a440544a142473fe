"""Singular triplets of Jacobians against dense decompositions, and where they are known."""

import numpy as np
import pytest
import torch
from scipy.sparse.linalg import LinearOperator, svds
from torch import Tensor, nn

import residua
from residua.anatomy import NotDifferentiable, dense_jacobian, jacobian, jacobian_svd
from residua.anatomy.jacobian import Method, Products

B = 3


def matrix_with(values: Tensor, out: int, inn: int, seed: int = 0) -> Tensor:
    """A random matrix of given singular values."""
    g = torch.Generator().manual_seed(seed)
    u = torch.linalg.qr(torch.randn(out, len(values), generator=g, dtype=torch.float64))[0]
    v = torch.linalg.qr(torch.randn(inn, len(values), generator=g, dtype=torch.float64))[0]
    return u @ torch.diag(values.double()) @ v.T


def spectra() -> dict[str, Tensor]:
    n = 120
    return {
        "low rank": torch.cat([torch.tensor([5.0, 3.0, 1.0]), torch.zeros(n - 3)]),
        "decaying": 0.9 ** torch.arange(n),
        "flat": torch.linspace(2.0, 1.0, n),
        "repeated": torch.cat([torch.full((4,), 3.0), torch.full((4,), 2.0), torch.linspace(1, 0.1, n - 8)]),
    }


@pytest.mark.parametrize("method", ["dense", "formed", "lanczos"])
@pytest.mark.parametrize("name", list(spectra()))
@pytest.mark.parametrize("shape", [(120, 120), (150, 130)])
def test_the_jacobian_of_a_linear_map_is_its_matrix(name: str, method: str, shape: tuple[int, int]) -> None:
    values = spectra()[name]
    a = matrix_with(values, *shape)
    k = 8
    svd = jacobian_svd(lambda x: x @ a.T, torch.randn(B, shape[1], dtype=torch.float64), k, method=method)
    assert svd.method == method
    assert svd.converged.all()
    torch.testing.assert_close(svd.S, values[:k].double().expand(B, k), rtol=1e-6, atol=1e-8)
    for b in range(B):
        u, s, v = svd.U[b], svd.S[b], svd.V[b]
        real = s > 1e-8
        torch.testing.assert_close((v @ a.T)[real], (s[:, None] * u)[real], rtol=0, atol=1e-5)
        torch.testing.assert_close((u @ a)[real], (s[:, None] * v)[real], rtol=0, atol=1e-5)
        torch.testing.assert_close(v @ v.T, torch.eye(k, dtype=v.dtype), rtol=0, atol=1e-9)
        torch.testing.assert_close(u @ u.T, torch.eye(k, dtype=v.dtype), rtol=0, atol=1e-9)


def test_a_formed_matrix_that_lanczos_does_not_resolve_is_decomposed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jacobian, "_PATIENCE", 3)
    values = spectra()["flat"]
    a = matrix_with(values, 120, 120)
    svd = jacobian_svd(lambda x: x @ a.T, torch.randn(B, 120, dtype=torch.float64), 8, method="formed")
    assert svd.converged.all()
    torch.testing.assert_close(svd.S, values[:8].double().expand(B, 8), rtol=1e-9, atol=0)


def networks() -> dict[str, tuple[nn.Module, tuple[int, ...]]]:
    torch.manual_seed(0)
    conv = nn.Sequential(nn.Conv2d(4, 6, 3, padding=1), nn.GELU(), nn.Conv2d(6, 4, 3, padding=1))
    down = nn.Sequential(nn.Conv2d(4, 8, 3, stride=2, padding=1), nn.Tanh())
    vit = residua.create_model("vit", img_size=16, patch_size=4, embed_dim=24, depth=1, num_heads=2)
    return {
        "fully connected": (nn.Sequential(nn.Linear(60, 80), nn.Tanh(), nn.Linear(80, 60)), (60,)),
        "convolution": (conv, (4, 6, 6)),
        "shape-changing": (down, (4, 8, 8)),
        "attention": (residua.stream(vit)[0].branch, (17, 24)),
        "mlp": (residua.stream(vit)[1].branch, (17, 24)),
    }


@pytest.mark.parametrize("name", list(networks()))
def test_random_networks_against_a_dense_decomposition(name: str) -> None:
    f, shape = networks()[name]
    for module in [f] if isinstance(f, nn.Module) else [f.__self__]:
        module.double().eval()
    x = torch.randn(B, *shape, dtype=torch.float64)
    k = 10
    found = jacobian_svd(f, x, k, method="lanczos")
    for b in range(B):
        one = torch.autograd.functional.jacobian(lambda z, f=f: f(z[None])[0], x[b])
        j = one.reshape(found.U[b, 0].numel(), -1)
        _, s, vh = torch.linalg.svd(j)
        torch.testing.assert_close(found.S[b], s[:k], rtol=1e-6, atol=1e-9)
        torch.testing.assert_close(dense_jacobian(f, x)[b], j, rtol=1e-9, atol=1e-11)
        gap = int((s[:k] - s[1 : k + 1]).argmax()) + 1  # the subspace above the widest gap is well defined
        mine, exact = found.V[b, :gap].flatten(1), vh[:gap]
        torch.testing.assert_close(mine.T @ mine, exact.T @ exact, rtol=0, atol=1e-4)
        paired = torch.einsum("ki,ij,kj->k", found.U[b].flatten(1), j, found.V[b].flatten(1))
        torch.testing.assert_close(paired, s[:k], rtol=1e-6, atol=1e-9)  # signs belong together
    assert found.residual.max() <= 1e-5 * found.S.max()


def test_a_third_opinion() -> None:
    """scipy's own Lanczos through the same products."""
    f, shape = networks()["convolution"]
    f.double().eval()
    x = torch.randn(1, *shape, dtype=torch.float64)
    products = Products(f, x)
    size = products.in_size
    operator = LinearOperator(
        (products.out_size, size),
        matvec=lambda v: products.push(torch.from_numpy(v.reshape(1, 1, size)))[0, 0].numpy(),
        rmatvec=lambda u: products.pull(torch.from_numpy(u.reshape(1, 1, -1)))[0, 0].numpy(),
        dtype=np.float64,
    )
    expected = np.sort(svds(operator, k=6, return_singular_vectors=False, random_state=0))[::-1]
    np.testing.assert_allclose(jacobian_svd(f, x, 6, method="lanczos").S[0].numpy(), expected, rtol=1e-7)


def test_scaling_and_rotation() -> None:
    f, shape = networks()["fully connected"]
    f.double().eval()
    x = torch.randn(B, *shape, dtype=torch.float64)
    q = torch.linalg.qr(torch.randn(60, 60, dtype=torch.float64))[0]
    plain = jacobian_svd(f, x, 5).S
    torch.testing.assert_close(jacobian_svd(lambda z: 3 * f(z), x, 5).S, 3 * plain)
    torch.testing.assert_close(jacobian_svd(lambda z: f(z @ q) @ q.T, x @ q.T, 5).S, plain)


def test_samples_do_not_mix_and_chunks_change_nothing() -> None:
    f, shape = networks()["mlp"]
    f.__self__.double().eval()
    x = torch.randn(B, *shape, dtype=torch.float64)
    whole = jacobian_svd(f, x, 4, method="lanczos")
    alone = torch.cat([jacobian_svd(f, x[b : b + 1], 4, method="lanczos").S for b in range(B)])
    torch.testing.assert_close(whole.S, alone)
    tight = jacobian_svd(f, x, 4, method="lanczos", budget=1e-6)
    torch.testing.assert_close(whole.S, tight.S)


class Backward(torch.autograd.Function):
    """x^2 with no forward-mode derivative."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x**2

    @staticmethod
    def setup_context(ctx, inputs, output) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return 2 * x * grad


def test_without_forward_mode_the_reverse_mode_serves_twice() -> None:
    x = torch.rand(B, 30, dtype=torch.float64) + 0.1
    with pytest.warns(UserWarning, match="no forward-mode derivative, so products with J go by the reverse mode twice"):
        products = Products(Backward.apply, x)
    assert not products.forward_mode
    with pytest.warns(UserWarning, match="reverse mode"):
        svd = jacobian_svd(Backward.apply, x, 3, method="lanczos")
    torch.testing.assert_close(svd.S, (2 * x).sort(dim=1, descending=True).values[:, :3])


def test_the_map_made_linear_is_the_derivative() -> None:
    """What the iteration applies, for every kind of network; a map that cannot be traced is applied as it is."""
    for f, shape in networks().values():
        (f if isinstance(f, nn.Module) else f.__self__).double().eval()
        x = torch.randn(B, *shape, dtype=torch.float64)
        products = Products(f, x)
        v = torch.randn(B, 5, products.in_size, dtype=torch.float64)
        plain = products.push(v)
        products.linearize()
        assert products._linear is not None
        torch.testing.assert_close(products.push(v), plain)
    branching = Products(lambda x: x**2 if float(x.detach().sum()) > 0 else x, torch.ones(1, 6).double())
    branching.linearize()
    torch.testing.assert_close(branching.push(torch.eye(6).double()[None]), 2 * torch.eye(6).double()[None])


def test_chunks_count_what_a_branch_runs_on_not_what_is_measured() -> None:
    """One number in, one out, a million on the way."""
    wide = Products(lambda x: x.expand(-1, 2**20).mean(1, keepdim=True) ** 2, torch.ones(1, 1), budget=0.25)
    assert wide.chunk <= 2**28 / (4 * 2**20)


def test_single_precision_is_not_shortened() -> None:
    """Settings of training, such as TF32, are put aside and come back."""
    torch.set_float32_matmul_precision("high")
    seen: list[str] = []

    def watched(x: Tensor) -> Tensor:
        seen.append(torch.get_float32_matmul_precision())
        return x**2

    try:
        jacobian_svd(watched, torch.rand(1, 4), 1)
        assert set(seen) == {"highest"}
        assert torch.get_float32_matmul_precision() == "high"
    finally:
        torch.set_float32_matmul_precision("highest")


def test_not_converged_is_said() -> None:
    a = torch.randn(300, 300, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    svd = jacobian_svd(lambda x: x @ a.T, torch.randn(1, 300, dtype=torch.float64), 20, method="lanczos", rounds=6)
    assert not svd.converged.all()
    assert svd.rounds == 6
    assert svd.residual.max() > 1e-6


def test_wrong_inputs() -> None:
    f = nn.Linear(4, 4)
    with pytest.raises(ValueError, match="expected a batch"):
        jacobian_svd(f, torch.randn(4), 1)
    with pytest.raises(ValueError, match="float32 or float64"):
        jacobian_svd(f, torch.randn(2, 4).half(), 1)
    with pytest.raises(ValueError, match="choose 1 to 4"):
        jacobian_svd(f, torch.randn(2, 4), 5)
    with pytest.raises(ValueError, match="keep the batch"):
        jacobian_svd(lambda x: x.sum(0, keepdim=True), torch.randn(2, 4), 1)
    with pytest.raises(ValueError, match="choose one of auto, dense, formed, lanczos"):
        jacobian_svd(f, torch.randn(2, 4), 1, method="qr")  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_hard_spectra_converge_in_either_precision(dtype: torch.dtype) -> None:
    g = torch.Generator().manual_seed(0)
    gaussian = torch.randn(300, 300, generator=g, dtype=torch.float64)
    slow = matrix_with(torch.arange(1, 601) ** -0.5, 600, 600)
    for a in (gaussian, slow, gaussian[:80], gaussian[:, :80]):
        exact = torch.linalg.svdvals(a)[:30]
        b = a.to(dtype)
        svd = jacobian_svd(lambda x, b=b: x @ b.T, torch.randn(1, b.shape[1], dtype=dtype), 30, method="lanczos")
        assert svd.converged.all()
        tolerance = 1e-12 if dtype == torch.float64 else 2e-6
        torch.testing.assert_close(svd.S[0].double(), exact, rtol=tolerance, atol=tolerance * float(exact[0]))


def test_a_dead_sample_beside_a_living_one() -> None:
    a = torch.randn(60, 60, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    both = torch.stack([a, torch.zeros_like(a)])
    svd = jacobian_svd(lambda x: torch.einsum("bij,bj->bi", both, x), torch.ones(2, 60).double(), 5, method="lanczos")
    torch.testing.assert_close(svd.S[0], torch.linalg.svdvals(a)[:5])
    assert svd.S[1].tolist() == [0.0] * 5
    assert svd.converged.all()
    assert svd.V.isfinite().all()
    torch.testing.assert_close(svd.V[1] @ svd.V[1].T, torch.eye(5, dtype=torch.float64))


def test_running_out_of_memory_names_the_budget() -> None:
    def hungry(x: Tensor) -> Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory")

    with pytest.raises(torch.OutOfMemoryError, match=r"2 samples and a budget of 0.5 GiB"):
        jacobian_svd(hungry, torch.randn(2, 4), 1, budget=0.5)


def test_a_map_without_derivative_is_named() -> None:
    with pytest.raises(NotDifferentiable, match="cannot be differentiated"):
        jacobian_svd(lambda x: torch.from_numpy(x.detach().numpy() ** 2), torch.randn(2, 4), 1)


def test_the_method_follows_the_size() -> None:
    """A full decomposition for little, Lanczos on the formed matrix for more; a hard matrix is decomposed after all."""
    a = torch.randn(420, 420, dtype=torch.float64, generator=torch.Generator().manual_seed(0))

    def chosen(side: int, k: int) -> str:
        x = torch.zeros(1, side, dtype=torch.float64)
        return jacobian_svd(lambda z: z @ a[:side, :side].T, x, k).method

    assert (chosen(100, 5), chosen(420, 5), chosen(420, 110)) == ("dense", "formed", "dense")
    x = torch.zeros(1, 420, dtype=torch.float64)
    flat = torch.linalg.qr(a)[0]  # every singular value is 1
    svd = jacobian_svd(lambda z: z @ flat.T, x, 5, method="formed")
    assert svd.converged.all()
    torch.testing.assert_close(svd.S, torch.ones(1, 5, dtype=torch.float64))


def test_what_has_no_jacobian_is_refused_in_words() -> None:
    x = torch.randn(2, 5, dtype=torch.float64)
    with pytest.raises(NotDifferentiable, match="derivative is zero although the output changes"):
        jacobian_svd(lambda z: 2 * z.detach(), x, 2)
    with pytest.raises(NotDifferentiable, match="detached or rounded"):
        jacobian_svd(lambda z: (100 * z).round(), x, 2)
    with pytest.raises(ValueError, match="not finite"):
        jacobian_svd(lambda z: z / 0, x, 2)
    with pytest.raises(ValueError, match="returned a tuple"):
        jacobian_svd(lambda z: (z, z), x, 2)
    with pytest.raises(ValueError, match="must be positive"):
        jacobian_svd(torch.tanh, x, 2, budget=0)
    assert jacobian_svd(lambda z: 0 * z, x, 2).converged.all()  # a dead block is none of these


def test_one_number_out_of_many() -> None:
    x = torch.randn(3, 6, dtype=torch.float64)
    svd = jacobian_svd(lambda z: z.square().sum(1), x, 1)
    torch.testing.assert_close(svd.S[:, 0], 2 * x.norm(dim=1))
    assert svd.U.shape == (3, 1)


def test_residuals_are_told_for_small_values_of_large_jacobians() -> None:
    """Cut off early, the flat rest of a spectrum has not converged, far below the largest value as it is."""
    scale = torch.linspace(0.02, 0.01, 20_000)
    scale[0] = 1.0
    x = torch.zeros(1, 20_000)
    svd = jacobian_svd(lambda z: z * scale, x, 10, rounds=6)
    true = (svd.U * scale - svd.S[..., None] * svd.V).norm(dim=-1)
    torch.testing.assert_close(svd.residual, torch.maximum(true, svd.residual), rtol=1e-3, atol=1e-6)
    assert svd.converged[0, 0]
    assert not svd.converged[0, 1:].any()


def test_maps_that_are_not_of_one_sample_each_are_refused() -> None:
    x = torch.randn(4, 8)
    batch = nn.BatchNorm1d(8, track_running_stats=False)
    for mixed in (batch, lambda z: z.flip(0)):
        with pytest.raises(ValueError, match="mixes the samples"):
            jacobian_svd(mixed, x, 2)
    with pytest.raises(NotDifferentiable, match=r"in evaluation mode\? call model.eval"):
        jacobian_svd(nn.BatchNorm1d(8).train(), x, 2)
    assert jacobian_svd(nn.BatchNorm1d(8).eval(), x, 2).converged.all()
    with pytest.raises(ValueError, match="another output each time"):
        jacobian_svd(nn.Dropout(0.5).train(), x, 2)


@pytest.mark.parametrize("method", ["dense", "formed", "lanczos"])
def test_a_derivative_that_is_not_finite_is_said_to_be_so(method: Method) -> None:
    with pytest.raises(ValueError, match="derivative is not finite"):
        jacobian_svd(lambda z: z.abs().sqrt(), torch.zeros(2, 8), 2, method=method)


def test_matrices_larger_than_the_memory_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jacobian, "memory", lambda device: 1000)
    x = torch.randn(2, 20)
    for method in ("dense", "formed"):
        with pytest.raises(torch.OutOfMemoryError, match=r"2 Jacobians of 20 x 20 take .* use method lanczos"):
            jacobian_svd(torch.tanh, x, 2, method=method)
    assert jacobian_svd(torch.tanh, x, 2, method="lanczos").converged.all()


def test_what_a_map_changes_in_place_does_not_pile_up() -> None:
    weight = torch.randn(12, 12, generator=torch.Generator().manual_seed(0), dtype=torch.float64)

    def f(x: Tensor) -> Tensor:
        scale = torch.zeros(12, 12, dtype=x.dtype)
        scale += torch.eye(12, dtype=x.dtype)
        return torch.tanh(x @ (weight * scale))

    x = torch.randn(3, 12, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    expected = torch.linalg.svdvals(torch.stack([torch.func.jacrev(f)(sample) for sample in x]))
    torch.testing.assert_close(jacobian_svd(f, x, 3, method="lanczos").S, expected[:, :3])


def test_a_layer_of_torch_has_a_forward_mode() -> None:
    layer = nn.TransformerEncoderLayer(8, 2, 16, norm_first=True, batch_first=True).eval().requires_grad_(False)
    x = torch.randn(2, 3, 8, generator=torch.Generator().manual_seed(0))
    assert Products(layer, x).forward_mode
    assert torch.backends.mha.get_fastpath_enabled()
    expected = torch.func.jacrev(lambda z: layer(z[None]).flatten())(x[0]).reshape(24, 24)
    torch.testing.assert_close(jacobian_svd(layer, x, 3).S[0], torch.linalg.svdvals(expected)[:3], atol=1e-4, rtol=1e-4)
