"""A data set in figures, for `residua data info`."""

from __future__ import annotations

from typing import Any

import numpy as np

from residua.data.source import Source, Splits, count_shared

_NAMED = 10  # unreadable images that are named


def describe(splits: Splits) -> dict[str, Any]:
    """Counts, sizes, channels, classes, channel statistics and images shared by the splits; fit for JSON."""
    train = splits.train
    mean, std = train.stats()
    return {
        "name": splits.name,
        "channels": train.channels,
        "dtype": train.dtype.name,
        "classes": train.classes if train.labels is not None else None,
        "mean": list(mean),
        "std": list(std),
        "train": _describe_split(train),
        "test": None if splits.test is None else _describe_split(splits.test),
        "shared": None if splits.test is None else count_shared(train, splits.test, most=None),
    }


def _describe_split(source: Source) -> dict[str, Any]:
    sizes = source.sizes()
    per_class = None
    readable, unreadable = source.tried()
    if source.labels is not None and source.classes is not None:
        counts = np.bincount(source.labels, minlength=len(source.classes))
        per_class = dict(zip(source.classes, counts.tolist()))
    return {
        "split": source.split,
        "count": len(source),
        "opened": len(readable) + len(unreadable),
        "unreadable": len(unreadable),
        "unreadable_images": [source.identify(i) for i in unreadable[:_NAMED]],
        "typical_size": list(source.typical_size()),
        "smallest": sizes.min(axis=0).tolist(),
        "largest": sizes.max(axis=0).tolist(),
        "per_class": per_class,
    }
