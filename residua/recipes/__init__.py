"""Rows of the papers, runnable: settings, what they cost, and the numbers to expect."""

from __future__ import annotations

import difflib
from dataclasses import dataclass
from typing import Any

from residua.train.config import Pretrain

PAPER = {
    "batch_size": 1024, "base_lr": 1.5e-4, "weight_decay": 0.05, "betas": (0.9, 0.95), "warmup": 0.05, "epochs": 800,
    "scale": (0.2, 1.0), "img_size": 224, "patch_size": 16, "size": "base", "mask_ratio": 0.75, "decoder": "ushape",
}  # fmt: skip


@dataclass(frozen=True)
class Recipe:
    """Settings with a name. `residua pretrain NAME` runs it; flags override single settings."""

    name: str
    summary: str
    settings: dict[str, Any]
    cost: str
    expect: str

    @property
    def config(self) -> Pretrain:
        return Pretrain().override(**self.settings)


RECIPES = {
    recipe.name: recipe
    for recipe in [
        Recipe(
            "mae-shapes",
            "ViT-nano on the embedded, procedural shapes; for a first look and for machines without a GPU",
            {"data": "shapes", "size": "nano", "batch_size": 64, "lr": 1e-3, "epochs": 30, "alpha_min": 0.9},
            "1,920 steps, 6 minutes on 2 CPU cores",
            "last block: linear probe (lbfgs) 31, kNN 22; untrained 20 and 14; raw pixels 15 and 27",
        ),
        Recipe(
            "mae-cifar100",
            "ViT-S/4 on CIFAR-100 at 32 px",
            {"data": "cifar100", "size": "small", "img_size": 32, "patch_size": 4, "batch_size": 256, "lr": 3e-4,
             "epochs": 200, "alpha_min": 0.9},
            "39k steps of 256 images",
            "not measured yet",
        ),
        Recipe(
            "mae-tiny-imagenet",
            "ViT-S/8 on Tiny-ImageNet at 64 px, the setting of docs/results.md",
            {"data": "parquet:tiny-imagenet-100", "size": "small", "img_size": 64, "patch_size": 8, "batch_size": 256,
             "lr": 3e-4, "epochs": 112, "alpha_min": 0.9},
            "21.9k steps; 4 minutes on an H200 (30k images/s)",
            "linear probe 37.6, kNN 26.1 (37.4 and 26.7 at alpha_min 1; one seed each)",
        ),
        Recipe(
            "mae-imagenet100",
            "The paper's ablations: ViT-B/16 on a folder of ImageNet-100, alpha_min 0.6",
            PAPER | {"data": "folder:imagenet100", "alpha_min": 0.6},
            "99k steps of 1,024 images at 224 px",
            "paper: linear probe 83.6 (76.5 at alpha_min 1); ViT-S: 78.5 (69.2)",
        ),
        Recipe(
            "mae-imagenet1k",
            "The paper's main result: ViT-B/16 on ImageNet-1K, alpha_min 0.6",
            PAPER | {"data": "imagenet:imagenet", "alpha_min": 0.6},
            "1.0 M steps of 1,024 images at 224 px",
            "paper: linear probe 72.7 (67.8 at alpha_min 1), kNN 63.9 (27.4), fine-tuning 82.9 (83.6)",
        ),
    ]
}  # fmt: skip


def get(name: str) -> Recipe:
    """A recipe by name, or an error that names the nearest ones."""
    if name not in RECIPES:
        near = difflib.get_close_matches(name, RECIPES, n=3, cutoff=0.4) or list(RECIPES)
        raise ValueError(
            f"no recipe named {name!r}; did you mean {', '.join(near)}? (a settings file must end in .yaml)"
        )
    return RECIPES[name]
