import warnings
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image

from residua import room
from residua.data import BadImage, Crops, DataError, Feed, decode, feed, load, views
from residua.data import source as source_module
from residua.data.arrays import ArraySource
from residua.data.augment import Batch, Several

RNG = np.random.default_rng(0)
BATCHES = [torch.tensor([3, 1, 2]), torch.tensor([9, 9]), torch.tensor([0])]


@pytest.fixture
def photos(tmp_path):
    """Twelve photos of different sizes, one of them large."""
    for k in range(12):
        size = (90, 130) if k == 5 else (16 + k, 30 - k)
        Image.fromarray(RNG.integers(0, 256, (*size, 3), dtype=np.uint8)).save(tmp_path / f"{k:02d}.png")
    return tmp_path


def spoil(folder, *numbers: int) -> None:
    for k in numbers:
        file = folder / f"{k:02d}.png"
        file.write_bytes(file.read_bytes()[:100])


@pytest.mark.parametrize("workers", [0, 2])
def test_streaming_equals_resident(photos, workers):
    source = load(f"folder:{photos}").train
    resident = Feed(source, "cpu", img_size=16, resident=True)
    stream = Feed(source, "cpu", img_size=16, resident=False, workers=workers)
    for _ in range(2):  # workers persist
        pairs = list(zip(resident.iterate(BATCHES), stream.iterate(BATCHES), strict=True))
        assert len(pairs) == 3
        for (ours, theirs), index in zip(pairs, BATCHES):
            assert torch.equal(ours.index, index)
            assert torch.equal(theirs.index, index)
            assert torch.equal(ours.pixels, theirs.pixels)
            assert torch.equal(ours.sizes, theirs.sizes)
    assert stream.wait_seconds > 0
    assert resident.wait_seconds == 0
    stream.close()


def test_pixels_are_the_images(photos):
    source = load(f"folder:{photos}").train
    batch = next(Feed(source, "cpu", img_size=16).iterate([torch.tensor([4, 5])]))
    assert batch.pixels.dtype == torch.uint8
    assert batch.sizes.tolist() == [[20, 26], [32, 46]]  # the large one is shrunk: 2 x img_size
    assert torch.equal(batch.pixels[0, :, :20, :26], torch.from_numpy(source.read(4).transpose(2, 0, 1).copy()))


def test_only_images_that_fill_their_canvas_are_full(photos):
    assert not Feed(load(f"folder:{photos}").train, "cpu", img_size=16, resident=True).full
    assert Feed(load("digits").train, "cpu", img_size=8, resident=True).full


def test_images_of_different_sizes_take_no_more_memory_than_their_pixels(photos):
    source = load(f"folder:{photos}").train
    resident = Feed(source, "cpu", img_size=16, resident=True)
    assert resident._pixels is not None
    pixels = sum(source.read(i, 16).size for i in range(12))
    assert resident._pixels.nbytes == pixels < 0.8 * 12 * 3 * resident.canvas[0] * resident.canvas[1]
    batch = resident.gather(torch.tensor([4, 5, 4]))
    there = feed._gather(resident._pixels, resident._starts[[4, 5, 4]], batch.sizes, resident.canvas)  # as a GPU does
    assert torch.equal(there, batch.pixels)


def test_images_larger_than_those_looked_at_find_room(photos, monkeypatch):
    source = load(f"folder:{photos}").train
    expected = next(Feed(source, "cpu", img_size=16, resident=False, workers=0).iterate([torch.arange(12)]))
    monkeypatch.setattr(feed, "_pixels_of", lambda kept, total: 100)
    found = Feed(source, "cpu", img_size=16, resident=True).gather(torch.arange(12))
    assert torch.equal(found.pixels, expected.pixels)


def test_resident_images_of_a_smaller_side(photos):
    source = load(f"folder:{photos}").train
    resident = Feed(source, "cpu", img_size=16, resident=True, resident_side=20)
    batch = resident.gather(torch.arange(12))
    assert batch.sizes.min(1).values.tolist() == [16, 17, 18, 19, 20, 20, 20, 20, 20, 20, 20, 19]
    small = decode.resize(source.read(5, 16), 20, 29)
    assert torch.equal(batch.pixels[5, :, :20, :29], torch.from_numpy(small).permute(2, 0, 1))
    stream = Feed(source, "cpu", img_size=16, resident=False, resident_side=20, workers=0)
    assert next(stream.iterate([torch.tensor([5])])).sizes.tolist() == [[32, 46]]
    with pytest.raises(DataError, match="smaller than the views of 16"):
        Feed(source, "cpu", img_size=16, resident_side=15)


def test_large_images_of_an_array_are_shrunk_as_others_are():
    images = RNG.integers(0, 256, (3, 90, 120, 3), dtype=np.uint8)
    source = ArraySource("noise", "train", images, None, None)
    found = Feed(source, "cpu", img_size=(8, 16), resident=True).gather(torch.arange(3))
    assert found.sizes.tolist() == [[32, 43]] * 3  # twice the longer side of the views
    for i, pixels in enumerate(found.pixels):
        assert torch.equal(pixels, torch.tensor(source.read(i, 16)).permute(2, 0, 1))


def test_abandoned_pass_leaves_no_trace(photos):
    stream = Feed(load(f"folder:{photos}").train, "cpu", img_size=16, resident=False, workers=2)
    many = stream.iterate([torch.tensor([k]) for k in range(12)])
    next(many)
    found = [batch.index.tolist() for batch in stream.iterate(BATCHES)]
    assert found == [index.tolist() for index in BATCHES]
    stream.close()


@pytest.mark.parametrize("resident", [True, False])
def test_global_random_state_is_left_alone(photos, resident):
    before = torch.get_rng_state()
    ours = Feed(load(f"folder:{photos}").train, "cpu", img_size=16, resident=resident, workers=1)
    list(ours.iterate(BATCHES))
    assert torch.equal(torch.get_rng_state(), before)
    ours.close()


def test_batches_are_drawn_lazily(photos):
    """An endless stream of indices is fine."""

    def endless():
        while True:
            yield torch.tensor([1, 2])

    stream = Feed(load(f"folder:{photos}").train, "cpu", img_size=16, resident=False, workers=1)
    batches = stream.iterate(endless())
    assert [next(batches).index.tolist() for _ in range(3)] == [[1, 2]] * 3
    stream.close()


@pytest.mark.parametrize("resident", [True, False])
def test_bad_image_stops_and_is_named(photos, resident):
    spoil(photos, 7)
    source = load(f"folder:{photos}").train
    with pytest.raises(BadImage, match=rf"{photos}/07\.png: .*--on-bad-image skip"):
        list(Feed(source, "cpu", img_size=16, resident=resident, workers=1).iterate([torch.arange(12)]))


@pytest.mark.parametrize("resident", [True, False])
def test_the_next_readable_image_takes_the_place_of_a_bad_one(photos, resident):
    spoil(photos, 3, 4, 11)
    source = load(f"folder:{photos}").train
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        ours = Feed(source, "cpu", img_size=16, resident=resident, workers=1, on_bad_image="skip")
    assert len(told) == resident
    assert len(ours) == len(ours.source) == 12
    for _ in range(2):
        batch = next(ours.iterate([torch.tensor([2, 3, 4, 6, 11])]))
        assert batch.index.tolist() == [2, 5, 5, 6, 0]
    height, width = batch.sizes[3].tolist()
    expected = torch.from_numpy(source.read(6).transpose(2, 0, 1).copy())
    assert torch.equal(batch.pixels[3, :, :height, :width], expected)
    assert ours.skipped == 3
    with warnings.catch_warnings(record=True) as later:
        warnings.simplefilter("always")
        ours.close()
    (note,) = told + later
    assert "3 of 12 train images cannot be read and are skipped: 03.png, 04.png, 11.png" in str(note.message)


def test_bad_images_or_not_streaming_equals_resident(photos):
    spoil(photos, 0, 3, 4, 10, 11)
    source = load(f"folder:{photos}").train
    feeds = [Feed(source, "cpu", img_size=16, resident=r, workers=0, on_bad_image="skip") for r in (True, False)]
    ours, theirs = (next(feed.iterate([torch.arange(len(feed))])) for feed in feeds)
    for name in ("pixels", "sizes", "index"):
        assert torch.equal(getattr(ours, name), getattr(theirs, name))
    assert feeds[0].skipped == feeds[1].skipped == 5


def test_a_long_row_of_bad_images_is_not_read_again_for_each(monkeypatch):
    images = RNG.integers(0, 256, (400, 8, 8, 3), dtype=np.uint8)
    source, reads = ArraySource("noise", "train", images, None, None), []

    def read(i, target=None):
        reads.append(i)
        if 50 <= i < 350:
            raise BadImage(str(i), "spoilt")
        return images[i]

    monkeypatch.setattr(source, "read", read)
    stream = Feed(source, "cpu", img_size=8, resident=False, workers=0, on_bad_image="skip")
    reads.clear()
    found = torch.cat([batch.index for batch in stream.iterate(torch.arange(400).split(64))])
    assert found.tolist() == [350 if 50 <= i < 350 else i for i in range(400)]
    assert stream.skipped == 300
    assert len(reads) <= 400 + 2 * 300


def test_nothing_readable(photos):
    source = load(f"folder:{photos}").train
    spoil(photos, *range(12))
    for resident in (True, False):
        with pytest.raises(DataError, match="none of its 12"):
            list(Feed(source, "cpu", img_size=16, resident=resident, workers=0, on_bad_image="skip").iterate(BATCHES))


def test_sixteen_bit_images_are_floats():
    images = RNG.integers(0, 65536, (5, 8, 8, 1), dtype=np.uint16)
    batch = next(Feed(ArraySource("x", "train", images, None, None), "cpu", img_size=8).iterate([torch.arange(5)]))
    torch.testing.assert_close(batch.pixels[:, 0], torch.from_numpy(images[..., 0] / 65535).float())


def test_residence_is_decided_by_memory(monkeypatch):
    images = np.zeros((100, 8, 8, 3), np.uint8)
    source = ArraySource("x", "train", images, None, None)
    for free, resident in ((images.nbytes / 0.41, False), (images.nbytes / 0.39, True)):
        monkeypatch.setattr(feed, "free_memory", lambda device, free=free: int(free))
        assert Feed(source, "cpu", img_size=8).resident == resident
    monkeypatch.setattr(feed, "free_memory", lambda device: 1000)
    with pytest.raises(DataError, match="resident=False"):
        Feed(source, "cpu", img_size=8, resident=True)


def test_the_processes_of_a_machine_share_cores_and_memory(monkeypatch):
    source = ArraySource("x", "train", np.zeros((4, 8, 8, 3), np.uint8), None, None)
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(24)), raising=False)
    monkeypatch.setattr("psutil.virtual_memory", lambda: SimpleNamespace(total=9000, available=8000))
    for told, workers, share in ((None, 16, 1), ("1", 16, 1), ("4", 6, 4), ("100", 1, 100), ("", 16, 1)):
        monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
        if told is not None:
            monkeypatch.setenv("LOCAL_WORLD_SIZE", told)
        assert Feed(source, "cpu", img_size=8).workers == workers
        assert Feed(source, "cpu", img_size=8, workers=3).workers == 3
        assert room.free_memory(torch.device("cpu")) == 8000 // share


def test_progress_is_reported(photos):
    calls = []
    Feed(
        load(f"folder:{photos}").train,
        "cpu",
        img_size=16,
        progress=lambda *told: calls.append(told),
    )
    assert calls[-1] == ("decoding images", 12, 12)


def test_unusable_arguments(photos):
    source = load(f"folder:{photos}").train
    with pytest.raises(DataError, match="'error' or 'skip'"):
        Feed(source, "cpu", img_size=16, on_bad_image="ignore")
    with pytest.raises(DataError, match="workers -1, expected a number of processes"):
        Feed(source, "cpu", img_size=16, workers=-1)
    with pytest.raises(DataError, match="no images"):
        Feed(source.subset([]), "cpu", img_size=16)
    closed = Feed(source, "cpu", img_size=16)
    closed.close()
    with pytest.raises(RuntimeError, match="closed"):
        next(closed.iterate(BATCHES))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("resident", [True, False])
def test_gpu_receives_the_same_batches(photos, resident):
    source = load(f"folder:{photos}").train
    many = [torch.arange(k, k + 3) for k in range(9)] * 5
    ours = Feed(source, "cuda", img_size=16, resident=resident, workers=2)
    reference = Feed(source, "cpu", img_size=16, resident=True)
    for there, here in zip(ours.iterate(many), reference.iterate(many), strict=True):
        assert there.pixels.is_cuda
        assert torch.equal(there.pixels.cpu(), here.pixels)
        assert torch.equal(there.sizes.cpu(), here.sizes)
        assert torch.equal(there.index.cpu(), here.index)
    ours.close()


# ---------------------------------------------------------------- views made where images are decoded

EPOCHS = [torch.tensor([0, 1, 1]), torch.tensor([0, 4]), 2]


@pytest.fixture
def mixed(tmp_path):
    """Photos of many kinds and sizes: turned, grey, with alpha, long and thin, larger than what is kept."""
    exif = Image.Exif()
    exif[0x0112] = 6
    shapes = [(70, 90), (40, 33), (12, 9), (200, 17), (30, 400), (150, 160), (33, 33), (64, 64), (41, 55), (90, 90)]
    for k, size in enumerate(shapes):
        picture = Image.fromarray(RNG.integers(0, 256, (*size, 3), dtype=np.uint8))
        match k:
            case 1:
                picture.save(tmp_path / f"{k:02d}.jpg", exif=exif)
            case 2:
                picture.convert("L").save(tmp_path / f"{k:02d}.jpg")
            case 3:
                picture.convert("CMYK").save(tmp_path / f"{k:02d}.jpg")
            case 6:
                picture.convert("RGBA").save(tmp_path / f"{k:02d}.png")
            case _:
                picture.save(tmp_path / f"{k:02d}.jpg", quality=95)
    return tmp_path


def batches_of(ours: Feed) -> list:
    found = list(ours.iterate(BATCHES, EPOCHS))
    ours.close()
    return found


@pytest.mark.parametrize("central", [False, True])
@pytest.mark.parametrize("workers", [0, 2])
def test_views_made_by_workers_are_those_of_resident_images(mixed, workers, central):
    source = load(f"folder:{mixed}").train
    crops = Crops((24, 20), seed=3, central=central)
    resident = Feed(source, "cpu", img_size=(24, 20), resident=True, crops=crops)
    stream = Feed(source, "cpu", img_size=(24, 20), resident=False, workers=workers, crops=crops)
    assert stream.cuts
    assert not resident.cuts
    for whole, cut, index, epoch in zip(batches_of(resident), batches_of(stream), BATCHES, EPOCHS):
        assert cut.cut
        assert cut.pixels.dtype == torch.uint8
        assert cut.pixels.shape == (len(index), 3, 24, 20)
        assert torch.equal(cut.index, index)
        assert torch.equal(crops(cut, epoch), crops(whole, epoch))


def test_views_are_pils_crops_of_the_images_as_they_are_kept(mixed):
    source = load(f"folder:{mixed}").train
    crops = Crops((24, 24), seed=1)
    stream = Feed(source, "cpu", img_size=24, resident=False, workers=0, crops=crops)
    index, epoch = torch.arange(len(source)), torch.full((len(source),), 7)
    (batch,) = stream.iterate([index], [epoch])
    height, width = stream.canvas
    for i, view in enumerate(batch.pixels):
        image = source.read(i, 24)
        if image.shape[0] > height or image.shape[1] > width:
            continue  # cut at its ends, as in a resident feed
        box = crops.boxes(torch.tensor([i]), 7, torch.tensor([image.shape[:2]]))
        top, left, h, w = (int(x) for x in box[0])
        picture = Image.fromarray(image).crop((left, top, left + w, top + h)).resize((24, 24), Image.Resampling.BICUBIC)
        mirrored = crops.mirrored(torch.tensor([i]), 7)
        assert mirrored is not None
        theirs = np.asarray(picture)[:, ::-1] if mirrored[0] else np.asarray(picture)
        off = np.abs(view.permute(1, 2, 0).numpy().astype(int) - theirs)
        assert np.mean(off <= 2) > 0.99
        assert np.mean(off) < 0.5


@pytest.mark.parametrize("resident", [True, False])
def test_an_image_unlike_those_looked_at_is_kept_as_any_other(tmp_path, monkeypatch, resident):
    """Whatever sizes the sample has."""
    monkeypatch.setattr(source_module, "_PROBED", 2)
    sizes = {0: (20, 20), 1: (20, 20), 5: (90, 90), 6: (110, 30), 9: (20, 20)}
    for k in range(10):
        pixels = RNG.integers(0, 256, (*sizes.get(k, (20, 20)), 3), dtype=np.uint8)
        Image.fromarray(pixels).save(tmp_path / f"{k}.png")
    source, crops = load(f"folder:{tmp_path}").train, Crops((40, 40), flip=False)
    assert source.sizes().tolist() == [[20, 20]] * 2
    ours = Feed(source, "cpu", img_size=40, resident=resident, workers=0, crops=crops)
    (batch,) = ours.iterate([torch.tensor([5, 6])])
    for i, view in zip((5, 6), crops(batch, 0)):
        image = torch.tensor(source.read(i, 40)).permute(2, 0, 1)[None]
        whole = Batch(image, torch.tensor([image.shape[2:]]), torch.tensor([i]))
        assert torch.equal(view, crops(whole, 0)[0])


def test_whole_images_larger_than_the_canvas_are_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(source_module, "_PROBED", 2)
    for k, side in enumerate((20, 30, 20)):
        Image.new("RGB", (side, side)).save(tmp_path / f"{k}.png")
    ours = Feed(load(f"folder:{tmp_path}").train, "cpu", img_size=20, resident=False, workers=0)
    with pytest.raises(BadImage, match=r"1\.png: it is 30 x 30, larger than the 20 x 20 of others"):
        list(ours.iterate([torch.arange(3)]))


@pytest.mark.parametrize("workers", [0, 2])
def test_several_views_of_an_image_are_made_at_once(mixed, workers):
    source = load(f"folder:{mixed}").train
    parts = [
        (Crops((24, 20), central=True, flip=False, crop_pct=0.8), 0),
        (Crops((24, 20), 5), 0),
        (Crops((24, 20), 5), 1),
    ]
    both = Feed(source, "cpu", img_size=24, resident=False, workers=workers, crops=Several(tuple(parts)))
    (batch,) = both.iterate([torch.arange(10)])
    both.close()
    assert batch.pixels.shape == (10, 3, 3, 24, 20)
    whole = Feed(source, "cpu", img_size=24, resident=True).gather(torch.arange(10))
    for k, (crops, epoch) in enumerate(parts):
        assert torch.equal(batch.pixels[:, k].float() / 255, crops(whole, epoch))


def test_views_of_sixteen_bits_are_floats():
    images = RNG.integers(0, 65536, (5, 30, 40, 1), dtype=np.uint16)
    source, crops = ArraySource("x", "train", images, None, None), Crops((16, 16))
    feeds = [Feed(source, "cpu", img_size=16, resident=way, workers=0, crops=crops) for way in (True, False)]
    whole, cut = (next(ours.iterate([torch.arange(5)], [1])) for ours in feeds)
    assert cut.pixels.dtype == torch.float32
    assert torch.equal(crops(cut, 1), crops(whole, 1))


def test_views_of_images_that_take_the_place_of_bad_ones(photos):
    spoil(photos, 0, 3, 4, 11)
    source, crops = load(f"folder:{photos}").train, Crops((16, 16))
    feeds = [
        Feed(source, "cpu", img_size=16, resident=way, workers=0, crops=crops, on_bad_image="skip")
        for way in (True, False)
    ]
    whole, cut = (next(ours.iterate([torch.arange(12)], [torch.arange(12)])) for ours in feeds)
    assert torch.equal(whole.index, cut.index)
    assert torch.equal(crops(cut, torch.arange(12)), crops(whole, torch.arange(12)))


@pytest.mark.parametrize("workers", [0, 1, 3])
def test_batches_of_several_tasks_are_put_together_in_order(workers):
    images = np.arange(200, dtype=np.uint8)[:, None, None, None] + np.zeros((1, 8, 8, 1), np.uint8)
    source = ArraySource("numbers", "train", images, None, None)
    stream = Feed(source, "cpu", img_size=8, resident=False, workers=workers, crops=Crops((8, 8)))
    wanted = [torch.arange(100), torch.arange(50, 82), torch.randperm(200), torch.tensor([7])]
    for _ in range(2):
        for batch, index in zip(stream.iterate(wanted), wanted, strict=True):
            assert torch.equal(batch.index, index)
            assert torch.equal(batch.pixels[:, 0, 4, 4].long(), index)
    stream.close()


@pytest.mark.parametrize("workers", [0, 2])
def test_batches_that_were_handed_over_stay_as_they_are(workers):
    images = np.arange(256, dtype=np.uint8)[:, None, None, None] + np.zeros((1, 8, 8, 1), np.uint8)
    source = ArraySource("numbers", "train", images, None, None)
    stream = Feed(source, "cpu", img_size=8, resident=False, workers=workers, crops=Crops((8, 8)))
    found = list(stream.iterate(torch.arange(256).split(8)))  # many more than wait in memory
    stream.close()
    assert torch.cat([batch.pixels[:, 0, 4, 4] for batch in found]).tolist() == list(range(256))


@pytest.mark.parametrize(("size", "workers"), [(16, 2), (100, 2), (640, 1)])
def test_no_more_waits_in_memory_than_is_said(size, workers):
    source = ArraySource("x", "train", np.zeros((8, 8, 8, 3), np.uint8), None, None)
    stream = Feed(source, "cpu", img_size=8, resident=False, workers=workers, crops=Crops((8, 8)))
    drawn = []

    def endless():
        while True:
            drawn.append(size)
            yield torch.zeros(size, dtype=torch.long)

    batches = stream.iterate(endless())
    for taken in range(1, 4):
        next(batches)
        tasks = -(-size // 32)
        waiting = max(2 * workers, 2 * tasks + workers - 1)
        assert len(drawn) - taken <= 2 + -(-waiting // tasks)
    stream.close()


# ---------------------------------------------------------------- views for anybody's loop


@pytest.mark.parametrize("resident", [True, False])
def test_views_see_each_image_once_an_epoch(photos, resident):
    ours = views(f"folder:{photos}", img_size=16, batch_size=5, device="cpu", resident=resident, workers=1)
    found = [next(ours) for _ in range(12)]
    ours.close()
    seen = torch.cat([torch.stack([epoch, index], 1) for _, index, epoch in found])
    for epoch in range(5):
        assert sorted(seen[seen[:, 0] == epoch, 1].tolist()) == list(range(12))
    images = torch.cat([images for images, *_ in found])
    assert images.shape == (60, 3, 16, 16)
    assert images.dtype == torch.float32


def test_views_of_nothing():
    with pytest.raises(DataError, match="img_size 0, expected at least 1"):
        views("digits", img_size=0)
    with pytest.raises(DataError, match="batch_size 0"):
        views("digits", img_size=8, batch_size=0)
