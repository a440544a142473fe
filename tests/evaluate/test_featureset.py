import pytest
import torch

from residua.evaluate import FeatureSet, knn
from residua.evaluate.featureset import class_numbers


def two_layers() -> FeatureSet:
    x = torch.arange(12.0).view(4, 3)
    return FeatureSet(
        {1: x, 4: x[:, :2]}, torch.tensor([0, 1, 1, 0]), ids=list("abcd"), views={4: torch.zeros(2, 4, 2)}
    )


def test_the_deepest_layer_is_last_and_unpacks_with_the_labels() -> None:
    f = two_layers()
    x, y = f
    assert f.layers == [1, 4]
    assert torch.equal(x, f.layer(4))
    assert torch.equal(y, f.targets)
    assert len(f) == 4


def test_only_one_layer_or_some_of_the_rows() -> None:
    f = two_layers()
    assert f.only(1).layers == [1]
    assert f.only(1).views == {}
    part = f.subset(torch.tensor([3, 1]))
    assert (part.ids, part.targets.tolist()) == (["d", "b"], [0, 1])
    assert torch.equal(part.layer(1), f.layer(1)[[3, 1]])
    assert part.views[4].shape == (2, 2, 2)


def test_missing_labels_are_named() -> None:
    with pytest.raises(ValueError, match="no labels"):
        _ = FeatureSet({0: torch.randn(2, 2)}).targets


def test_read_outs_beside_each_other() -> None:
    f = two_layers()
    f.others["cls"] = FeatureSet({1: -f.layer(1), 4: -f.layer(4)}, f.labels, f.ids, "cls")
    assert f.readouts == ["tokens", "cls"]
    assert torch.equal(f.of("cls").layer(1), -f.of("tokens").layer(1))
    assert f.of("tokens").readouts == ["tokens"]
    assert f.only(4).of("cls").layers == [4]
    rows = torch.tensor([2, 0])
    assert torch.equal(f.subset(rows).of("cls").last, -f.last[rows])
    with pytest.raises(KeyError, match="read-out 'patches' was not extracted; there are tokens, cls"):
        f.of("patches")


@pytest.mark.parametrize("labels", [torch.zeros(4, 1), torch.zeros(3), torch.zeros(4, 2)])
def test_there_is_one_label_for_each_row(labels: torch.Tensor) -> None:
    with pytest.raises(ValueError, match="test: 4 rows of features but"):
        knn((torch.eye(4), torch.arange(4)), (torch.eye(4), labels.long()), k=1)


def test_class_numbers_have_no_gaps_and_keep_their_order() -> None:
    (a, b), count = class_numbers(torch.tensor([10**15, 3, 3]), torch.tensor([7, 10**15]))
    assert (a.tolist(), b.tolist(), count) == ([2, 0, 0], [1, 2], 3)
