"""Where images come from and how a batch reaches the device.

splits = residua.data.load("folder:photos")
feed = residua.data.Feed(splits.train, "cuda", img_size=64)
mean, std = splits.train.stats()
for batch in feed.iterate(torch.randperm(len(feed)).split(256)):
    x = residua.data.train_view(batch, 64, mean, std, seed=0, epoch=0)
"""

from residua.data import rng
from residua.data.augment import Batch, Crops, center_view, train_view
from residua.data.catalog import NAMES, load
from residua.data.describe import describe
from residua.data.errors import BadImage, DataError
from residua.data.feed import Feed, views
from residua.data.order import Order
from residua.data.preprocess import Preprocessing
from residua.data.preview import preview
from residua.data.source import Source, Splits, count_shared

__all__ = [
    "NAMES",
    "BadImage",
    "Batch",
    "Crops",
    "DataError",
    "Feed",
    "Order",
    "Preprocessing",
    "Source",
    "Splits",
    "center_view",
    "count_shared",
    "describe",
    "load",
    "preview",
    "rng",
    "train_view",
    "views",
]
