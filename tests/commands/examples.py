"""What users write, for the type checker: packages are called, and their names have types."""

from pathlib import Path
from typing import assert_type

from torch import Tensor

import residua
import residua.evaluate.knn
from residua.anatomy.study import Anatomy
from residua.evaluate import KnnResult, Report


def examples() -> None:
    model = residua.create_model("mae_vit_small", img_size=64, patch_size=8, alpha_min=0.6)
    feats = residua.evaluate.extract(model, "cifar100", layers="all", readout="tokens")
    assert feats.test is not None
    assert_type(residua.evaluate.knn(feats.train, feats.test, k=20, temperature=0.07), KnnResult)
    residua.evaluate.linear_probe(feats.train, feats.test, protocol="simple")
    residua.evaluate.entropy_rank(feats.test.last), residua.evaluate.rankme(feats.test.last)
    assert_type(residua.evaluate(model, data="cifar100", probe=None), Report)

    assert_type(residua.sample("runs/d", 4, steps=25), Tensor)
    assert_type(residua.sample("runs/d", 4, "samples"), Path)
    assert_type(residua.anatomy("torchvision:resnet18", data="cifar10", top=30), Anatomy)
    residua.anatomy.jacobian_svd(lambda x: 2 * x, feats.test.last, k=30)
    assert_type(residua.export("runs/a", to="transformers").largest, float)
    for step in residua.stream(model):
        print(step.name, float(step.alpha))
