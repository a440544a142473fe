import pytest
from scipy.stats import binomtest

from residua.evaluate.interval import wilson


@pytest.mark.parametrize(("hits", "n"), [(0, 10), (10, 10), (1, 3), (677, 1000), (36_350, 50_000)])
def test_it_is_scipys(hits: int, n: int) -> None:
    expected = binomtest(hits, n).proportion_ci(0.95, method="wilson")
    assert wilson(100 * hits / n, n) == pytest.approx((100 * expected.low, 100 * expected.high))


def test_nonsense_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one image"):
        wilson(50.0, 0)
    with pytest.raises(ValueError, match="percent"):
        wilson(float("nan"), 10)
