from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import Image
from scipy import stats
from torchvision.transforms import InterpolationMode, RandomResizedCrop
from torchvision.transforms import functional as TF
from torchvision.transforms.v2.functional import resized_crop

from residua.data import rng
from residua.data.augment import (
    CROP_LANES,
    Batch,
    Crops,
    center_boxes,
    center_view,
    random_resized_crop_boxes,
    resample,
    train_view,
    uncropped,
)

MODES = {"bilinear": InterpolationMode.BILINEAR, "bicubic": InterpolationMode.BICUBIC}
BOXES = [(0, 0, 48, 40), (3, 5, 20, 31), (10, 2, 7, 5), (47, 39, 1, 1), (0, 8, 48, 3)]


def pictures(count: int, channels: int = 3, height: int = 48, width: int = 40) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randint(0, 256, (count, channels, height, width), generator=generator, dtype=torch.uint8)


def batch_of(pixels: torch.Tensor, start: int = 0) -> Batch:
    count, _, height, width = pixels.shape
    return Batch(pixels, torch.tensor([[height, width]]).repeat(count, 1), torch.arange(start, start + count))


@pytest.mark.parametrize("interpolation", ["bilinear", "bicubic"])
@pytest.mark.parametrize("out_size", [(16, 16), (64, 56), (33, 9)])
def test_resample_equals_torchvision(interpolation, out_size):
    pixels = pictures(len(BOXES))
    ours = resample(pixels.float() / 255, torch.tensor(BOXES), out_size, interpolation=interpolation)
    for image, box, mine in zip(pixels, BOXES, ours):
        theirs = TF.resized_crop(image.float() / 255, *box, list(out_size), MODES[interpolation], antialias=True)
        torch.testing.assert_close(mine, theirs, atol=2e-5, rtol=0)


@pytest.mark.parametrize(("interpolation", "same"), [("bilinear", 0.8), ("bicubic", 0.9)])
def test_resample_of_uint8_equals_torchvision_to_rounding(interpolation, same):
    """Whole numbers after each axis; theirs come from weights of 16 bits, and values halfway may go to either side."""
    pixels = pictures(len(BOXES))
    ours = resample(pixels, torch.tensor(BOXES), 24, interpolation=interpolation)
    for image, box, mine in zip(pixels, BOXES, ours):
        theirs = resized_crop(image, *box, [24, 24], MODES[interpolation], antialias=True)
        off = (mine * 255 - theirs).abs()
        assert off.max() < 2.001
        assert (off < 1e-3).float().mean() > same


@pytest.mark.parametrize(("interpolation", "same"), [("bilinear", 0.85), ("bicubic", 0.99)])
def test_resample_within_an_image_has_pils_whole_numbers(interpolation, same):
    """But for values halfway between two numbers, which may go to either; of noise bilinear filters make many."""
    pixels, sizes = pictures(3), torch.tensor([[48, 40]] * 3)
    ours = resample(pixels, torch.tensor([[0, 0, 48, 40]] * 3), (24, 28), interpolation=interpolation, within=sizes)
    images = [Image.fromarray(image.permute(1, 2, 0).numpy()) for image in pixels]
    resized = [np.asarray(image.resize((28, 24), Image.Resampling[interpolation.upper()])) for image in images]
    off = (ours * 255 - torch.from_numpy(np.stack(resized)).permute(0, 3, 1, 2)).abs()
    assert off.max() < 1.001
    assert (off < 1e-3).float().mean() > same


def test_flip_mirrors():
    pixels, boxes = pictures(4), torch.tensor([BOXES[1]] * 4)
    plain = resample(pixels, boxes, (20, 28))
    mirrored = resample(pixels, boxes, (20, 28), flip=torch.tensor([True, False, True, False]))
    torch.testing.assert_close(mirrored[::2], plain[::2].flip(-1), atol=1.001 / 255, rtol=0)  # halfway, either way
    torch.testing.assert_close(mirrored[1::2], plain[1::2])


def test_whole_box_at_its_own_size_is_the_image():
    pixels = pictures(2)
    boxes = torch.tensor([[0, 0, 48, 40]] * 2)
    torch.testing.assert_close(resample(pixels, boxes, (48, 40)), pixels.float() / 255, atol=1e-6, rtol=0)


def test_padding_is_never_seen():
    image = pictures(1, height=30, width=22)
    canvas = torch.full((1, 3, 48, 40), 255, dtype=torch.uint8)
    canvas[:, :, :30, :22] = image
    box = torch.tensor([[2, 1, 28, 21]])
    torch.testing.assert_close(resample(canvas, box, 16), resample(image, box, 16), atol=1e-6, rtol=0)


@pytest.mark.parametrize(
    ("height", "width", "scale"),
    [
        (64, 64, (0.2, 1.0)),
        (40, 90, (0.2, 1.0)),
        (200, 20, (0.5, 1.0)),
        (20, 200, (0.2, 1.0)),
        (5, 7, (0.08, 1.0)),
    ],
)
def test_boxes_are_distributed_as_torchvisions(height, width, scale):
    count = 4000
    torch.manual_seed(0)
    ratio = (3 / 4, 4 / 3)
    image = torch.zeros(1, height, width)
    params = [RandomResizedCrop.get_params(image, list(scale), list(ratio)) for _ in range(count)]
    theirs = np.array(params, float)
    u = rng.uniform(0, 0, torch.arange(count), CROP_LANES, "crop")
    sizes = torch.tensor([[height, width]]).repeat(count, 1)
    ours = random_resized_crop_boxes(u, sizes, scale, ratio).double().numpy()
    assert (ours == ours.round()).all()
    assert (ours[:, :2] >= 0).all()
    assert (ours[:, 2:] >= 1).all()
    assert (ours[:, 0] + ours[:, 2] <= height).all()
    assert (ours[:, 1] + ours[:, 3] <= width).all()
    probes = [lambda b, k=k: b[:, k] for k in range(4)] + [
        lambda b: b[:, 2] * b[:, 3],
        lambda b: b[:, 2] / b[:, 3],
    ]
    for probe in probes:
        assert stats.ks_2samp(probe(ours), probe(theirs)).pvalue > 1e-3


@pytest.mark.parametrize(("height", "width"), [(64, 64), (40, 90), (7, 5)])
def test_boxes_are_torchvisions_on_the_same_numbers(height, width):
    """Attempt by attempt: the first that fits, the whole side included, at a place with a number for each axis."""
    u = rng.uniform(3, 0, torch.arange(200), CROP_LANES, "crop").double()
    attempts = (CROP_LANES - 2) // 2
    expected = []
    for row in u.tolist():
        for chance, shape in zip(row[:attempts], row[attempts : 2 * attempts]):
            area, aspect = height * width * (0.2 + 0.8 * chance), (3 / 4) ** (1 - 2 * shape)
            w, h = round((area * aspect) ** 0.5), round((area / aspect) ** 0.5)
            if 0 < w <= width and 0 < h <= height:
                expected.append([int(row[-2] * (height - h + 1)), int(row[-1] * (width - w + 1)), h, w])
                break
        else:
            expected.append(None)
    ours = random_resized_crop_boxes(u.float(), torch.tensor([[height, width]]).repeat(200, 1)).int().tolist()
    found = [(box, mine) for box, mine in zip(expected, ours) if box is not None]
    assert len(found) > 150
    assert [mine for _, mine in found] == [box for box, _ in found]


def test_fallback_box_equals_torchvisions():
    """An image so thin that no attempt fits: the box is then not random."""
    for height, width in ((300, 10), (10, 300)):
        theirs = RandomResizedCrop.get_params(torch.zeros(1, height, width), [0.9, 1.0], [3 / 4, 4 / 3])
        u = rng.uniform(1, 0, torch.arange(8), CROP_LANES, "crop")
        ours = random_resized_crop_boxes(u, torch.tensor([[height, width]] * 8), (0.9, 1.0))
        assert (ours == torch.tensor(theirs)).all()


def test_center_boxes():
    sizes = torch.tensor([[96, 64], [32, 32], [30, 90]])
    assert center_boxes(sizes, 32).tolist() == [[16, 0, 64, 64], [0, 0, 32, 32], [0, 30, 30, 30]]
    assert center_boxes(sizes, (32, 64)).tolist() == [[32, 0, 32, 64], [8, 0, 16, 32], [0, 15, 30, 60]]
    assert center_boxes(sizes[:1], 32, crop_pct=0.5).tolist() == [[32, 16, 32, 32]]
    assert center_boxes(sizes, 32, crop_mode="squash").tolist() == [[0, 0, 96, 64], [0, 0, 32, 32], [0, 0, 30, 90]]
    assert center_boxes(sizes[:1], (32, 8), crop_pct=0.5, crop_mode="squash").tolist() == [[24, 16, 48, 32]]


@pytest.mark.parametrize("side", [24, 96, 224])
def test_a_share_of_whole_numbers_gives_back_the_side_it_was_made_from(side):
    """Whatever the quotient was rounded to: 224 / (224 / 354) is a little below 354."""
    assert [uncropped(side, side / n) for n in range(side, 2 * side)] == list(range(side, 2 * side))


@pytest.mark.parametrize("size", [(100, 60), (47, 31), (31, 47), (20, 23), (1, 9), (354, 354)])
@pytest.mark.parametrize("crop_pct", [1.0, 0.875, 24 / 29])
def test_center_boxes_lie_where_torchvision_crops(size, crop_pct):
    short = round(24 / crop_pct) if crop_pct != 0.875 else 27
    resized = TF.resize(torch.zeros(1, *size), short).shape[1:]
    ramp = torch.arange(resized[0] * resized[1]).reshape(1, *resized)
    top, left = divmod(int(TF.center_crop(ramp, [24, 24])[0, 0, 0]), resized[1])
    (box,) = center_boxes(torch.tensor([size]), 24, crop_pct).tolist()
    units = [n / m for n, m in zip(size, resized)] * 2
    np.testing.assert_allclose(box, np.array([top, left, 24, 24]) * units, rtol=1e-6)


def test_center_view_of_a_fitting_image_only_normalises():
    pixels = pictures(3, height=32, width=32)
    mean, std = (0.4, 0.5, 0.6), (0.2, 0.3, 0.4)
    view = center_view(batch_of(pixels), 32, mean, std)
    torch.testing.assert_close(view, TF.normalize(pixels / 255, mean, std), atol=1e-5, rtol=0)
    assert view.is_contiguous()


def test_train_view_depends_only_on_seed_epoch_and_index():
    pixels = pictures(6)
    whole = train_view(batch_of(pixels), 24, (0.5,) * 3, (0.5,) * 3, seed=1, epoch=2)
    part = train_view(batch_of(pixels[4:], start=4), 24, (0.5,) * 3, (0.5,) * 3, seed=1, epoch=2)
    torch.testing.assert_close(part, whole[4:])
    for seed, epoch in ((1, 3), (2, 2)):
        other = train_view(batch_of(pixels), 24, (0.5,) * 3, (0.5,) * 3, seed=seed, epoch=epoch)
        assert not torch.allclose(other, whole, atol=0.1)


@pytest.mark.parametrize("interpolation", ["bilinear", "bicubic"])
def test_train_view_is_crop_flip_normalise_of_pil(interpolation):
    pixels = pictures(16)
    batch = batch_of(pixels)
    options = {"seed": 5, "epoch": 1, "scale": (0.3, 1.0), "interpolation": interpolation}
    view = train_view(batch, 24, (0.5,) * 3, (0.25,) * 3, **options)
    boxes = random_resized_crop_boxes(rng.uniform(5, 1, batch.index, CROP_LANES, "crop"), batch.sizes, (0.3, 1.0))
    flips = rng.uniform(5, 1, batch.index, 1, "flip")[:, 0] < 0.5
    assert 0 < flips.sum() < 16
    for image, (top, left, h, w), flip, mine in zip(pixels, boxes.long().tolist(), flips, view):
        crop = Image.fromarray(image.permute(1, 2, 0).numpy()).crop((left, top, left + w, top + h))
        theirs = TF.to_tensor(crop.resize((24, 24), Image.Resampling[interpolation.upper()]))
        off = (mine * 0.25 + 0.5 - (TF.hflip(theirs) if flip else theirs)).abs() * 255
        assert off.max() < 1.001
        assert (off < 1e-3).float().mean() > 0.9


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32])
@pytest.mark.parametrize("central", [False, True])
def test_views_cut_on_a_cpu_are_those_of_two_matrix_products(dtype, central):
    """Which a GPU computes; uint8 but for values halfway between two numbers."""
    pixels = pictures(12) if dtype == torch.uint8 else pictures(12, channels=5) / 255 + 3
    batch, crops = batch_of(pixels), Crops((24, 20), seed=2, central=central)
    ours, epoch = crops(batch, 1), torch.ones(12, dtype=torch.long)
    boxes = center_boxes(batch.sizes, (24, 20)) if central else crops.boxes(batch.index, epoch, batch.sizes)
    within = batch.sizes if central else None
    other = resample(pixels, boxes, (24, 20), crops.mirrored(batch.index, epoch), within=within)
    if dtype == torch.float32:
        torch.testing.assert_close(ours, other, atol=3e-5, rtol=0)
    else:
        off = (ours - other).abs() * 255
        assert off.max() < 1.001
        assert (off < 1e-3).float().mean() > 0.95


def test_views_that_are_cut_already_are_left_alone():
    pixels = pictures(3, height=8, width=8)
    batch = replace(batch_of(pixels), cut=True)
    view = train_view(batch, 8, (0.5,) * 3, (0.25,) * 3, seed=0, epoch=0)
    torch.testing.assert_close(view, (pixels / 255 - 0.5) / 0.25)


def test_views_do_not_depend_on_the_layout_of_the_image():
    images = list(pictures(6))
    last = [image.permute(1, 2, 0).contiguous().permute(2, 0, 1) for image in images]
    crops, args = Crops((24, 24)), (torch.arange(6), 0, torch.tensor([[48, 40]] * 6))
    ours, theirs = (crops.cut(found, *args, torch.empty(6, 24, 24, 3, dtype=torch.uint8)) for found in (images, last))
    assert torch.equal(ours, theirs)


def test_any_number_of_channels_and_float_pixels():
    pixels = torch.rand(2, 5, 20, 20) * 3
    view = center_view(batch_of(pixels), 20, (0.0,) * 5, (1.0,) * 5)
    torch.testing.assert_close(view, pixels, atol=1e-5, rtol=0)


def test_autocast_does_not_coarsen_the_picture():
    batch = batch_of(pictures(2))
    plain = center_view(batch, 24, (0.5,) * 3, (0.5,) * 3)
    with torch.autocast("cpu", torch.bfloat16):
        torch.testing.assert_close(center_view(batch, 24, (0.5,) * 3, (0.5,) * 3), plain)


def test_unknown_interpolation():
    with pytest.raises(ValueError, match="bicubic"):
        resample(pictures(1), torch.tensor([[0, 0, 8, 8]]), 8, interpolation="lanczos")


def test_compiled_view_is_the_same():
    """What a GPU computes as one graph; on a CPU the view is left out of it."""
    batch, crops = batch_of(pictures(8), start=10**9), Crops((24, 24))

    def view(batch: Batch, epoch: torch.Tensor) -> torch.Tensor:
        boxes = crops.boxes(batch.index, epoch, batch.sizes)
        return resample(batch.pixels, boxes, 24, crops.mirrored(batch.index, epoch))

    def whole(batch: Batch, epoch: torch.Tensor) -> torch.Tensor:
        return train_view(batch, 24, (0.5,) * 3, (0.5,) * 3, seed=0, epoch=epoch)

    epoch = torch.full((8,), 3)
    compiled = torch.compile(view, fullgraph=True, backend="aot_eager")(batch, epoch)
    torch.testing.assert_close(compiled, view(batch, epoch))
    assert torch.equal(torch.compile(whole, backend="aot_eager")(batch, epoch), whole(batch, epoch))
