"""What frozen features are worth: nearest neighbours, linear probes, rank; always beside free baselines.

feats = extract(model, "cifar100", layers="all", readout="tokens")
knn(feats.train, feats.test, k=20, temperature=0.07)
linear_probe(feats.train, feats.test, protocol="simple")
entropy_rank(feats.test.last), rankme(feats.test.last)
"""

from .embed import embed
from .features import extract, pixel_features
from .featureset import Features, FeatureSet
from .knn import KnnResult, knn
from .neighbors import Neighbors, nearest_neighbors, neighbor_images
from .probe import Head, ProbeResult, linear_probe
from .rank import CollapsedError, entropy_rank, rankme
from .report import Report, Score
from .suite import evaluate

__all__ = [
    "CollapsedError",
    "FeatureSet",
    "Features",
    "Head",
    "KnnResult",
    "Neighbors",
    "ProbeResult",
    "Report",
    "Score",
    "embed",
    "entropy_rank",
    "evaluate",
    "extract",
    "knn",
    "linear_probe",
    "nearest_neighbors",
    "neighbor_images",
    "pixel_features",
    "rankme",
]
