"""What frozen features are worth: nearest neighbours, linear probes, rank; always beside free baselines.

feats = extract(model, "cifar100", layers="all", readout="tokens")
knn(feats.train, feats.test, k=20, temperature=0.07)
linear_probe(feats.train, feats.test, protocol="simple")
entropy_rank(feats.test.last), rankme(feats.test.last)

Called, the package scores a model as the command does: `residua.evaluate("runs/a")`.
"""

import sys
from typing import Any

from residua.callable import Command, command

from .attention_maps import attention_weights, class_attention
from .cache import CacheError, FeatureCache
from .dynamics import Dynamics, dynamics
from .features import extract, pixel_features
from .featureset import Features, FeatureSet
from .fid import Statistics, frechet_distance, inception_score, kernel_distance, precision_recall, statistics
from .finetune import FinetuneResult, finetune
from .generative import GenerativeReport, GenerativeScore
from .geometry import class_separation, layer_geometry, model_lidar, silhouette, variance_ratio
from .knn import FewShotResult, KnnResult, few_shot_knn, knn, knn_by_layer
from .neighbors import Neighbors, nearest_neighbors, neighbor_images
from .online import mae_probe
from .probe import Head, ProbeResult, linear_probe
from .rank import (
    CollapsedError,
    alpha_req,
    entropy_rank,
    lidar,
    participation_ratio,
    rankme,
    ranks,
    spectrum,
    stable_rank,
)
from .report import Report, Score
from .segmentation import Segmentation, SegmentScore
from .spectral import spectral_embedding

__all__ = [
    "CacheError",
    "CollapsedError",
    "Dynamics",
    "FeatureCache",
    "FeatureSet",
    "Features",
    "FewShotResult",
    "FinetuneResult",
    "GenerativeReport",
    "GenerativeScore",
    "Head",
    "KnnResult",
    "Neighbors",
    "ProbeResult",
    "Report",
    "Score",
    "SegmentScore",
    "Segmentation",
    "Statistics",
    "alpha_req",
    "attention_weights",
    "class_attention",
    "class_separation",
    "dynamics",
    "entropy_rank",
    "extract",
    "few_shot_knn",
    "finetune",
    "frechet_distance",
    "inception_score",
    "kernel_distance",
    "knn",
    "knn_by_layer",
    "layer_geometry",
    "lidar",
    "linear_probe",
    "mae_probe",
    "model_lidar",
    "nearest_neighbors",
    "neighbor_images",
    "participation_ratio",
    "pixel_features",
    "precision_recall",
    "rankme",
    "ranks",
    "silhouette",
    "spectral_embedding",
    "spectrum",
    "stable_rank",
    "statistics",
    "variance_ratio",
]

sys.modules[__name__].__class__ = Command


def __getattr__(name: str) -> Any:
    """What is a command by itself: `residua.evaluate.score` is `residua.score`."""
    if name in ("embed", "evaluate", "score", "segment"):
        return command(name)
    raise AttributeError(f"module 'residua.evaluate' has no attribute {name!r}")
