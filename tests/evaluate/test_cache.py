import errno
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from residua.data import Preprocessing, Splits
from residua.evaluate import CacheError, FeatureCache, FeatureSet, extract
from residua.evaluate.cache import Entry, checksum, weights_hash
from residua.evaluate.suite import evaluate
from residua.nn import ViT


class Counter:
    """How many images passed the encoder."""

    def __init__(self, vit: ViT) -> None:
        self.images, plain = 0, vit.forward_features

        def counting(images, tap=None):
            self.images += len(images)
            return plain(images, tap=tap)

        vit.forward_features = counting  # type: ignore[method-assign]

    def since(self) -> int:
        seen, self.images = self.images, 0
        return seen


def passes(folder: Path) -> list[Path]:
    return [p.parent for p in folder.rglob("about.json")]


def same(a: FeatureSet | None, b: FeatureSet | None) -> None:
    assert a is not None
    assert b is not None
    assert (a.layers, a.readouts, a.ids) == (b.layers, b.readouts, b.ids)
    assert torch.equal(a.targets, b.targets)
    for readout in a.readouts:
        x, y = a.of(readout), b.of(readout)
        assert all(torch.equal(x.layer(i), y.layer(i)) for i in x.layers)
        assert x.views.keys() == y.views.keys()
        assert all(torch.equal(x.views[i], y.views[i]) for i in x.views)


def test_the_second_time_nothing_is_computed_and_the_numbers_are_the_same(vit: ViT, noise: Splits, tmp_path) -> None:
    options = {"layers": "all", "readout": ("cls", "tokens"), "views": 2, "batch_size": 8}
    plain, counter = extract(vit, noise, **options), Counter(vit)
    first = extract(vit, noise, **options, cache=tmp_path)
    assert counter.since() == 3 * (50 + 21)
    second = extract(vit, noise, **options, cache=str(tmp_path))
    assert counter.since() == 0
    for split in ("train", "test"):
        for found in (first, second):
            same(found.splits[split], plain.splits[split])


def test_fewer_layers_read_outs_and_views_are_there_already(vit: ViT, noise: Splits, tmp_path) -> None:
    plain = extract(vit, noise, layers=[1], readout="patches", views=1)
    extract(vit, noise, layers="all", readout=("cls", "patches"), views=2, cache=tmp_path)
    counter = Counter(vit)
    some = extract(vit, noise, layers=[1], readout="patches", views=1, cache=tmp_path)
    same(some.train, plain.train)
    assert counter.since() == 0


def test_more_cost_only_what_is_missing_and_replace_what_they_cover(vit: ViT, noise: Splits, tmp_path) -> None:
    plain = extract(vit, noise, layers="all", splits=("test",))
    options = {"splits": ("test",), "cache": FeatureCache(tmp_path)}
    extract(vit, noise, layers=[0], **options)
    whole = extract(vit, noise, layers="all", **options)
    same(whole.test, plain.test)
    assert sorted(len(json.loads((p / "about.json").read_text())["columns"]) for p in passes(tmp_path)) == [1, 2]
    assert (options["cache"].read, options["cache"].computed) == (1, 3)
    more = extract(vit, noise, layers="all", views=1, **options)
    assert more.test is not None
    assert more.test.views[2].shape == (1, 21, 32)
    assert len(passes(tmp_path)) == 1
    same(extract(vit, noise, layers="all", **options).test, plain.test)


def test_other_weights_images_or_transforms_are_other_features(vit: ViT, noise: Splits, tmp_path) -> None:
    counter = Counter(vit)

    def computes(data: Splits = noise, **options) -> bool:
        extract(vit, data, splits=("test",), cache=tmp_path, **options)
        return counter.since() > 0

    assert computes()
    assert not computes()
    assert not computes(batch_size=3)
    assert computes(seed=1)
    assert computes(limit=10)
    assert not computes(limit=10)
    assert computes(limit=11)
    assert computes(bf16=True)
    assert computes(img_size=32)
    noise.test.images[3, 0, 0, 0] ^= 1  # type: ignore[union-attr]
    assert computes()
    vit.preprocessing = Preprocessing((16, 16), (0.1,) * 3, (2.0,) * 3)
    assert computes()
    with torch.no_grad():
        vit.blocks[0].mlp.fc1.bias[3] += 1e-6  # type: ignore[operator,union-attr]
    assert computes()
    vit.shortcut.alpha *= 0.5
    assert computes()
    assert not computes()


def test_damage_is_noticed_told_and_repaired(vit: ViT, noise: Splits, tmp_path) -> None:
    plain = extract(vit, noise, splits=("test",))

    def flip(folder: Path) -> None:
        with (folder / "tokens.2.npy").open("r+b") as file:
            file.seek(1000)
            byte = file.read(1)[0]
            file.seek(1000)
            file.write(bytes([byte ^ 1]))

    def truncate(folder: Path) -> None:
        with (folder / "tokens.2.npy").open("r+b") as file:
            file.truncate(500)

    def empty(folder: Path) -> None:
        (folder / "tokens.2.npy").write_bytes(b"")

    def zipped(folder: Path) -> None:
        (folder / "index.npy").write_bytes(b"PK\x03\x04")

    def lose(folder: Path) -> None:
        (folder / "index.npy").unlink()

    def garble(folder: Path) -> None:
        (folder / "about.json").write_text("{")

    def replace(folder: Path) -> None:
        (folder / "about.json").write_text("[]")

    for damage in (flip, truncate, empty, zipped, lose, garble, replace):
        notes: list[str] = []
        cache = FeatureCache(tmp_path, notes.append)
        extract(vit, noise, splits=("test",), cache=cache)
        assert not notes
        damage(*passes(tmp_path))
        same(extract(vit, noise, splits=("test",), cache=cache).test, plain.test)
        assert "damaged" in notes[0]
        same(extract(vit, noise, splits=("test",), cache=cache).test, plain.test)
        assert len(notes) == 1
    garble(*passes(tmp_path))
    with pytest.warns(UserWarning, match="damaged"):
        extract(vit, noise, splits=("test",), cache=tmp_path)


@pytest.mark.parametrize("code", [errno.ENOMEM, errno.EMFILE])
def test_lack_of_memory_or_handles_is_no_damage(vit: ViT, noise: Splits, tmp_path, monkeypatch, code: int) -> None:
    extract(vit, noise, splits=("test",), cache=tmp_path)
    before = passes(tmp_path)

    def fails(*args: object, **options: object) -> None:
        raise OSError(code, os.strerror(code))

    with monkeypatch.context() as patch:
        patch.setattr(np, "load", fails)
        with pytest.raises(CacheError, match=os.strerror(code)):
            extract(vit, noise, splits=("test",), cache=tmp_path)
    assert passes(tmp_path) == before
    cache = FeatureCache(tmp_path)
    extract(vit, noise, splits=("test",), cache=cache)
    assert (cache.read, cache.computed) == (1, 0)


def test_two_that_finish_the_same_pass_leave_each_other_the_features(tmp_path) -> None:
    entry, rows = Entry(FeatureCache(tmp_path), tmp_path / "entry", {}), torch.randn(1, 5, 3)
    writers = [entry.writer().begin(5) for _ in range(2)]
    for writer in writers:
        writer.add({("tokens", 2): rows})
    index, passes_of, found = torch.arange(5), entry.passes, []

    def overtaken() -> list[Path]:
        """The second finishes, and clears up, while the first is about to."""
        if not found:
            found.append({})
            found[0] = writers[1].finish(index)
        return passes_of()

    entry.passes = overtaken  # type: ignore[method-assign]
    found.append(writers[0].finish(index))
    assert len(passes(tmp_path)) == 1
    for features in (*found, entry.load([("tokens", 2)], 0)[1]):
        assert torch.equal(features["tokens", 2], rows)


def test_what_killed_writers_left_is_removed_and_others_are_let_be(vit: ViT, noise: Splits, tmp_path) -> None:
    extract(vit, noise, splits=("test",), cache=tmp_path)
    entry = passes(tmp_path)[0].parent
    child = subprocess.run([sys.executable, "-c", "import os; print(os.getpid())"], capture_output=True, text=True)
    host = os.uname().nodename
    dead, alive = entry / f".part-{host}-{child.stdout.strip()}-00", entry / f".part-{host}-{os.getpid()}-00"
    elsewhere = entry / ".part-another-1-00"
    for part in (dead, alive, elsewhere):
        part.mkdir()
        (part / "tokens.2.npy").write_bytes(b"half")
    extract(vit, noise, splits=("train",), cache=tmp_path)
    assert [part.exists() for part in (dead, alive, elsewhere)] == [False, True, True]


def test_failure_on_the_way_leaves_nothing_half_done(vit: ViT, noise: Splits, tmp_path, monkeypatch) -> None:
    extract(vit, noise, layers=[0], splits=("test",), cache=tmp_path)
    before = passes(tmp_path)
    plain, calls = vit.forward_features, []

    def broken(images, tap=None):
        calls.append(1)
        if len(calls) == 3:
            raise RuntimeError("no")
        return plain(images, tap=tap)

    with monkeypatch.context() as patch:
        patch.setattr(vit, "forward_features", broken)
        with pytest.raises(RuntimeError, match="no"):
            extract(vit, noise, layers="all", splits=("test",), batch_size=4, cache=tmp_path)
    assert passes(tmp_path) == before
    assert not list(tmp_path.rglob(".part-*"))


def test_a_full_disk_is_said_and_nothing_is_lost(vit: ViT, noise: Splits, tmp_path, monkeypatch) -> None:
    extract(vit, noise, layers=[0], splits=("test",), cache=tmp_path)
    counter = Counter(vit)

    def full(*_) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    usage = shutil.disk_usage(tmp_path)._replace(free=100)
    for name, value in (("os.posix_fallocate", full), ("shutil.disk_usage", lambda _: usage), ("numpy.save", full)):
        with monkeypatch.context() as patch:
            patch.setattr(name, value)
            with pytest.raises(CacheError, match=r"No space left .*--no-cache.* untouched"):
                extract(vit, noise, layers="all", splits=("test",), cache=tmp_path)
        assert not list(tmp_path.rglob(".part-*"))
    counter.since()
    extract(vit, noise, layers=[0], splits=("test",), cache=tmp_path)
    assert counter.since() == 0


@pytest.mark.parametrize("code", [errno.EOPNOTSUPP, errno.EINVAL])
def test_a_disk_that_sets_no_space_aside_will_do(vit: ViT, noise: Splits, tmp_path, monkeypatch, code: int) -> None:
    def cannot(*_) -> None:
        raise OSError(code, os.strerror(code))

    plain = extract(vit, noise, splits=("test",))
    monkeypatch.setattr("os.posix_fallocate", cannot)
    assert torch.equal(extract(vit, noise, splits=("test",), cache=tmp_path).test.last, plain.test.last)


def test_a_folder_that_cannot_be_written_is_said(vit: ViT, noise: Splits, tmp_path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(CacheError, match="cannot write features"):
        extract(vit, noise, cache=tmp_path / "file")


def test_mapped_features_may_be_changed_without_changing_the_file(vit: ViT, noise: Splits, tmp_path) -> None:
    first, second = (extract(vit, noise, splits=("train",), cache=tmp_path).train.last for _ in range(2))
    second.mul_(0)
    assert first.any()
    assert extract(vit, noise, splits=("train",), cache=tmp_path).train.last.any()


def test_a_cached_evaluation_gives_the_same_report(vit: ViT, noise: Splits, tmp_path) -> None:
    options = {"probe": "cached", "epochs": 3, "layers": "all", "readout": ("tokens", "cls"), "neighbors": 2}
    plain = evaluate(vit, noise, **options)
    counter = Counter(vit)
    reports = [evaluate(vit, noise, **options, cache=tmp_path) for _ in range(2)]
    assert counter.since() == 4 * 50 + 21
    assert reports[0].to_json() == reports[1].to_json() == plain.to_json()


def test_hash_and_checksum_notice_every_change(vit: ViT) -> None:
    before = weights_hash(vit)
    assert weights_hash(vit) == before
    vit.shortcut.alpha[1] *= 0.5  # a buffer
    assert weights_hash(vit) != before
    tall, wide = (torch.nn.Linear(*shape, bias=False) for shape in ((2, 3), (3, 2)))
    with torch.no_grad():
        wide.weight.copy_(tall.weight.reshape(2, 3))
    assert weights_hash(tall) != weights_hash(wide)
    before = weights_hash(vit)
    vit.half()
    assert weights_hash(vit) != before
    x = np.arange(3_000_001, dtype=np.float32)
    for place in (0, 1_700_000, 3_000_000):
        y = x.copy()
        y[place] += 1
        assert checksum(y) != checksum(x)
    assert checksum(x.reshape(1, -1)) != checksum(x)


def test_what_a_module_says_of_itself_counts_as_its_weights_do(vit: ViT, noise: Splits, tmp_path) -> None:
    extract(vit, noise, cache=tmp_path)
    vit.norm.eps = 0.5
    same(extract(vit, noise, cache=tmp_path).test, extract(vit, noise).test)
