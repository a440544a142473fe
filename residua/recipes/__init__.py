"""Rows of the papers, runnable: settings, what they cost, and the numbers to expect."""

from __future__ import annotations

import difflib
from dataclasses import dataclass
from typing import Any, Literal

Command = Literal["pretrain", "diffuse"]

PAPER = {
    "batch_size": 1024, "base_lr": 1.5e-4, "weight_decay": 0.05, "betas": (0.9, 0.95), "warmup": 0.05, "epochs": 800,
    "scale": (0.2, 1.0), "img_size": 224, "patch_size": 16, "size": "base", "mask_ratio": 0.75, "decoder": "ushape",
    "zero_init": True,
}  # fmt: skip
UVIT = {
    "network": "uvit", "process": "vp", "batch_size": 128, "lr": 2e-4, "weight_decay": 0.03, "betas": (0.99, 0.999),
    "warmup_steps": 2500, "patch_size": 2,
}  # fmt: skip
LATENT = {
    "data": "folder:imagenet100", "size": "mid", "img_size": 256, "latents": "stabilityai/sd-vae-ft-ema",
    "steps": 300_000,
}  # fmt: skip
TINY_IMAGENET = (
    "the first 100 of Tiny-ImageNet's 200 classes by WordNet id, 50,000 training and 5,000 validation images of 64 px. "
    "http://cs231n.stanford.edu/tiny-imagenet-200.zip, unpacked: "
    "--data 'folder:tiny-imagenet-200?classes=tiny-imagenet-100'. Hugging Face, where WordNet ids are the class names: "
    "--data 'hf:zh-plus/tiny-imagenet?classes=tiny-imagenet-100&revision=b427d143d5e9bf39d5132c552063f3c5ba3facd6'. "
    "The runs in docs/records read them in another order, so expect equal scores within the spread of seeds"
)


@dataclass(frozen=True)
class Recipe:
    """Settings with a name. `residua COMMAND NAME` runs it; flags override single settings."""

    name: str
    summary: str
    settings: dict[str, Any]
    cost: str
    expect: str
    command: Command = "pretrain"
    images: str = ""  # where to get them, and the --data to type, if `data` in the settings does not say

    @property
    def config(self) -> Any:
        """Settings of the command: a `Pretrain` or a `Diffuse`."""
        from residua.recipes.arguments import config_of

        return config_of(self.command)().override(**self.settings)


RECIPES = {
    recipe.name: recipe
    for recipe in [
        Recipe(
            "mae-shapes",
            "ViT-nano on the embedded, procedural shapes; for a first look and for machines without a GPU",
            {"data": "shapes", "size": "nano", "batch_size": 64, "lr": 1e-3, "epochs": 30, "alpha_min": 0.9,
             "zero_init": True},
            "1,920 steps, 6 minutes on 2 CPU cores",
            "last block: linear probe (lbfgs) 31, kNN 22; untrained 20 and 14; raw pixels 15 and 27",
        ),
        Recipe(
            "mae-cifar100",
            "ViT-S/4 on CIFAR-100 at 32 px",
            {"data": "cifar100", "size": "small", "img_size": 32, "patch_size": 4, "batch_size": 256, "lr": 3e-4,
             "epochs": 200, "alpha_min": 0.7, "zero_init": False},
            "39k steps of 256 images; time not measured",
            "not measured yet",
        ),
        Recipe(
            "mae-tiny-imagenet",
            "ViT-S/8 on Tiny-ImageNet at 64 px, branches not from zero: the best setting of docs/results.md",
            {"data": "parquet:tiny-imagenet-100", "size": "small", "img_size": 64, "patch_size": 8, "batch_size": 256,
             "lr": 3e-4, "epochs": 112, "alpha_min": 0.7, "zero_init": False},
            "21.9k steps; 9 minutes on an H200 that three runs share",
            "three seeds: linear probe 40.7, kNN 27.5 (37.5 and 25.8 at alpha_min 1); with --steps 50000: 46.5 and "
            "33.4 (39.7 and 29.0)",
            images=TINY_IMAGENET,
        ),
        Recipe(
            "mae-imagenet100",
            "The paper's ablations: ViT-B/16 on a folder of ImageNet-100, alpha_min 0.6",
            PAPER | {"data": "folder:imagenet100", "alpha_min": 0.6},
            "99k steps of 1,024 images at 224 px; time not measured",
            "paper: linear probe 83.6 (76.5 at alpha_min 1); ViT-S: 78.5 (69.2)",
        ),
        Recipe(
            "mae-imagenet1k",
            "The paper's main result: ViT-B/16 on ImageNet-1K, alpha_min 0.6",
            PAPER | {"data": "imagenet:imagenet", "alpha_min": 0.6},
            "1.0 M steps of 1,024 images at 224 px; time not measured",
            "paper: linear probe 72.7 (67.8 at alpha_min 1), kNN 63.9 (27.4), fine-tuning 82.9 (83.6)",
        ),
        Recipe(
            "uvit-shapes",
            "U-ViT-nano on the embedded, procedural shapes at 16 px, told their class; for machines without a GPU",
            {"data": "shapes?size=16", "network": "uvit", "process": "flow", "size": "nano", "patch_size": 4,
             "batch_size": 64, "lr": 2e-3, "betas": (0.9, 0.99), "epochs": 30, "conditional": True, "alpha_min": 0.8},
            "1,920 steps, 5 minutes on one CPU core",
            "linear probe (lbfgs, t 0.05 and 0.2) 22.0; untrained 20.2, raw pixels 13.9; samples are blobs of colour",
            "diffuse",
        ),
        Recipe(
            "uvit-cifar10",
            "U-ViT-S/2 on CIFAR-10, ordinary shortcuts: the original's setting, unconditional",
            UVIT | {"data": "cifar10", "size": "small", "img_size": 32, "steps": 500_000, "alpha_min": 1.0,
                    "zero_init": False},
            "500k steps of 128 images; about 4 hours on an H200, at 28.9 ms a step",
            "Bao et al.: FID 3.11 (50k samples, Euler-Maruyama, 1,000 steps)",
            "diffuse",
        ),
        Recipe(
            "uvit-cifar100",
            "The paper's: U-ViT-S/2 on CIFAR-100, unconditional, alpha_min 0.7",
            UVIT | {"data": "cifar100", "size": "small", "img_size": 32, "steps": 500_000, "alpha_min": 0.7},
            "500k steps of 128 images (a guess at the paper's); about 4 hours on an H200, at 28.8 ms a step",
            "paper: FID 8.99 (14.34 at alpha_min 1), linear probe 66.86 (62.47)",
            "diffuse",
        ),
        Recipe(
            "uvit-imagenet100-latent",
            "The paper's: U-ViT-M/2 on 256 px ImageNet-100 in latents of a pretrained autoencoder, alpha_min 0.7",
            UVIT | LATENT | {"alpha_min": 0.7},
            "300k steps of 128 images (a guess at the paper's), latents 4 x 32 x 32, encoded once; "
            "time not measured",
            "paper: FID 41.17 (44.40 at alpha_min 1), linear probe 76.1 (72.8)",
            "diffuse",
        ),
        Recipe(
            "uvit-imagenet100-latent-cond",
            "The same, told the classes, alpha_min 0.6",
            UVIT | LATENT | {"alpha_min": 0.6, "conditional": True, "label_dropout": 0.15},
            "300k steps of 128 images (a guess at the paper's), latents 4 x 32 x 32, encoded once; "
            "time not measured",
            "paper: FID 4.98 with guidance (6.93 at alpha_min 1)",
            "diffuse",
        ),
    ]
}  # fmt: skip


def get(name: str, command: Command | None = None) -> Recipe:
    """A recipe by name, of a command if one is given, or an error that names the nearest ones."""
    if name in RECIPES and command not in (None, RECIPES[name].command):
        raise ValueError(f"{name} is a recipe of another command: residua {RECIPES[name].command} {name}")
    if name not in RECIPES:
        names = [recipe.name for recipe in RECIPES.values() if command in (None, recipe.command)]
        near = difflib.get_close_matches(name, names, n=3, cutoff=0.4) or names
        raise ValueError(
            f"no recipe named {name!r}; did you mean {', '.join(near)}? (a settings file must end in .yaml)"
        )
    return RECIPES[name]
