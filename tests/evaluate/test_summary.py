"""What is kept of a set of images, and what others have published of theirs."""

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

from residua.data import DataError
from residua.data.arrays import ArraySource
from residua.evaluate import CacheError, FeatureCache, statistics
from residua.evaluate import summary as module
from residua.evaluate.cache import Entry, checksum
from residua.evaluate.extractor import Extractor
from residua.evaluate.fid import Statistics
from residua.evaluate.generative import score
from residua.evaluate.summary import (
    Settings,
    keep_reference,
    published_statistics,
    store_statistics,
    summarize_batches,
)

CPU = torch.device("cpu")


def source(n: int, seed: int) -> ArraySource:
    pixels = np.random.default_rng(seed).integers(0, 256, (n, 12, 12, 3), dtype=np.uint8)
    return ArraySource(f"set{seed}", "train", pixels, None, None)


def images(n: int) -> Tensor:
    return torch.from_numpy(source(n, 0).images).permute(0, 3, 1, 2)


def test_statistics_that_are_whole_and_not_what_was_written_are_computed_again(
    small: Extractor, tmp_path: Path
) -> None:
    notes: list[str] = []
    cache = FeatureCache(tmp_path, notes.append)
    options = {"extractor": small, "cache": cache}
    first = score(source(5, 1), source(20, 2), **options)
    (file,) = tmp_path.rglob("statistics.npz")
    kept = dict(np.load(file))
    for changed in ({"mean": kept["mean"] + 1}, {"cov": 2 * kept["cov"]}, {"count": 7}):
        np.savez(file, **kept | changed)
        assert score(source(5, 1), source(20, 2), **options).scores == first.scores
        assert "damaged (it is not what was written)" in notes.pop()
    few = Statistics(7, torch.from_numpy(kept["mean"]), torch.from_numpy(kept["cov"]))
    store_statistics(Entry(cache, file.parent, {}), few)  # of another number of images than there are features
    assert score(source(5, 1), source(20, 2), metrics=("fid", "prc"), **options).reference["images"] == 20
    del kept["cov"]
    np.savez(file, **kept)
    assert score(source(5, 1), source(20, 2), **options).scores == first.scores
    assert len(notes) == 1


def test_statistics_of_an_older_version_are_computed_again_silently(small: Extractor, tmp_path: Path) -> None:
    """Their checksum left the number of images out."""
    notes: list[str] = []
    options = {"extractor": small, "cache": FeatureCache(tmp_path, notes.append)}
    first = score(source(5, 1), source(20, 2), **options)
    (file,) = tmp_path.rglob("statistics.npz")
    new = dict(np.load(file))
    mean, cov = new["mean"], new["cov"]
    np.savez(file, count=7, mean=mean, cov=cov, checksum=checksum(np.vstack([mean, cov])))
    again = score(source(5, 1), source(20, 2), **options)
    assert again.reference["images"] == 20
    assert again.scores == first.scores
    assert notes == []
    assert str(np.load(file)["checksum"]) == str(new["checksum"])


def test_a_reference_kept_beforehand_is_read_by_the_score(small: Extractor, tmp_path: Path) -> None:
    """At the size that the samples will have."""
    done: list[tuple[str, int, int]] = []
    cache = FeatureCache(tmp_path)
    keep_reference(
        source(20, 2), small, img_size=10, device="cpu", cache=cache, progress=lambda *told: done.append(told)
    )
    assert done[-1] == ("reading set2", 20, 20)
    assert cache.computed == 1
    found = score(source(5, 1), source(20, 2), extractor=small, img_size=10, cache=cache)
    assert (cache.computed, cache.read) == (1, 1)
    assert found.scores == score(source(5, 1), source(20, 2), extractor=small, img_size=10).scores


class Odd(ArraySource):
    """One image has another size, and was not among those that were looked at."""

    def read(self, i: int, target: int | None = None) -> np.ndarray:
        return super().read(i)[:, :8] if i == 3 else super().read(i)


def test_images_brought_to_their_own_size_are_kept_once(small: Extractor, tmp_path: Path) -> None:
    fakes, real = source(5, 1), source(20, 2)
    cache = FeatureCache(tmp_path / "cache")
    for metrics in ("fid", "kid"):
        options = {"metrics": metrics, "extractor": small, "cache": cache}
        found = [score(fakes, real, img_size=size, **options) for size in (None, 12)]
        assert found[0].scores == found[1].scores
    assert len(list(cache.folder.iterdir())) == 1
    assert (cache.computed, cache.read) == (2, 2)


def test_an_image_of_another_size_is_brought_to_the_size_only_where_that_was_asked_for(
    small: Extractor, tmp_path: Path
) -> None:
    odd = Odd("odd", "train", source(20, 2).images, None, None)
    fresh = score(source(5, 1), odd, extractor=small, img_size=12)
    for _ in range(2):
        kept = score(source(5, 1), odd, extractor=small, img_size=12, cache=tmp_path)
        assert kept.scores == fresh.scores
        with pytest.raises(DataError, match="differ in size"):
            score(source(5, 1), odd, extractor=small, cache=tmp_path)


@pytest.mark.filterwarnings("ignore:.*cannot be read")
def test_statistics_without_images_that_were_skipped_are_not_those_of_all(small: Extractor, tmp_path: Path) -> None:
    folder = tmp_path / "real"
    folder.mkdir()
    for i, image in enumerate(source(8, 2).images):
        Image.fromarray(image).save(folder / f"{i}.png")
    (folder / "3.png").write_bytes(b"not an image")
    options = {"extractor": small, "cache": tmp_path / "cache"}
    assert score(source(5, 1), folder, on_bad_image="skip", **options).reference["images"] == 7
    with pytest.raises(DataError, match=r"3\.png"):
        score(source(5, 1), folder, **options)


def test_a_folder_that_is_read_only_is_said_before_the_work(
    small: Extractor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def none_of_it(*_: object) -> None:
        raise AssertionError("work was done")

    small.module.register_forward_pre_hook(none_of_it)
    monkeypatch.setattr(module.os, "access", lambda *_: False)
    with pytest.raises(CacheError, match=rf"cannot write statistics to {tmp_path}: .*is read-only"):
        score(source(5, 1), source(5, 2), extractor=small, cache=tmp_path)


def test_half_precision_is_that_of_autocast(small: Extractor) -> None:
    with torch.inference_mode(), torch.autocast("cpu", torch.bfloat16):
        half = small.module(images(6)).float()
    with torch.inference_mode():
        full = small.module(images(6))
    assert not torch.equal(half, full)
    for bf16, expected in ((True, half), (False, full)):
        found = summarize_batches(images(6).split(4), small, Settings(CPU, bf16=bf16), features=True)
        assert found.features is not None
        torch.testing.assert_close(found.features, expected)
        torch.testing.assert_close(found.statistics.cov, statistics(expected).cov)
    assert summarize_batches([images(6)], small, Settings(CPU), features=False).features is None


def test_batches_tell_how_far_they_are(small: Extractor) -> None:
    told: list[tuple[str, int, int]] = []
    settings = Settings(CPU, progress=lambda *now: told.append(now))
    found = summarize_batches(images(7).split(4), small, settings, features=False, name="mine")
    assert told == [("reading mine", 4, 0), ("reading mine", 7, 0)]
    assert (found.name, found.count, found.size) == ("mine", 7, (12, 12))


def test_only_a_mean_and_a_covariance_are_published_statistics(tmp_path: Path) -> None:
    np.savez(tmp_path / "images.npz", source(4, 0).images)
    assert published_statistics(str(tmp_path / "images.npz")) is None
    np.savez(tmp_path / "half.npz", mu=np.zeros(3))
    assert published_statistics(str(tmp_path / "half.npz")) is None
    for other in (str(tmp_path), str(tmp_path / "none.npz"), source(4, 0)):
        assert published_statistics(other) is None
    cov = np.cov(np.random.default_rng(0).normal(size=(9, 3)), rowvar=False)
    np.savez(tmp_path / "stats.npz", mu=np.arange(3.0, dtype=np.float32), sigma=cov)
    found = published_statistics(str(tmp_path / "stats.npz"))
    assert found is not None
    assert found.mean.tolist() == [0, 1, 2]
    assert found.mean.dtype == torch.float64
    assert np.array_equal(found.cov, cov)
    assert not found.rank_deficient  # of how many images they are is not known
    content = (tmp_path / "stats.npz").read_bytes()
    (tmp_path / "stats.npz").write_bytes(content[: len(content) // 2])
    with pytest.raises(DataError, match=r"stats\.npz cannot be read, it may be damaged"):
        published_statistics(str(tmp_path / "stats.npz"))
    np.savez(tmp_path / "stats.npz", mu=np.zeros(3), sigma=np.zeros((2, 2)))
    with pytest.raises(DataError, match=r"mu of shape \(3,\) and sigma of \(2, 2\) are no mean and covariance"):
        published_statistics(str(tmp_path / "stats.npz"))
