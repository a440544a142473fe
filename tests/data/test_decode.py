import io
from pathlib import Path

import numpy as np
import pytest
from PIL import Image, ImageOps

from residua.data import decode
from residua.data.errors import BadImage

RNG = np.random.default_rng(0)
COLOUR = RNG.integers(0, 256, (12, 20, 3), dtype=np.uint8)
GREY16 = RNG.integers(0, 65536, (12, 20), dtype=np.uint16)


def saved(image: Image.Image, format: str, **options) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, format, **options)
    return buffer.getvalue()


@pytest.mark.parametrize(("format", "options"), [("PNG", {}), ("WEBP", {"lossless": True}), ("TIFF", {}), ("BMP", {})])
def test_lossless_formats_return_the_pixels(format, options):
    data = saved(Image.fromarray(COLOUR), format, **options)
    assert decode.header(data, "x") == (12, 20, 3, "uint8")
    assert np.array_equal(decode.decode(data, "x"), COLOUR)


def test_jpeg_is_close():
    smooth = np.linspace(0, 255, 12 * 20).reshape(12, 20).astype(np.uint8)[..., None].repeat(3, 2)
    found = decode.decode(saved(Image.fromarray(smooth), "JPEG", quality=95), "x")
    assert np.abs(found.astype(int) - smooth).max() < 8


@pytest.mark.parametrize("format", ["PNG", "TIFF"])
def test_sixteen_bits_are_kept(format):
    data = saved(Image.fromarray(GREY16), format)
    assert decode.header(data, "x") == (12, 20, 1, "uint16")
    found = decode.decode(data, "x")
    assert found.dtype == np.uint16
    assert np.array_equal(found[..., 0], GREY16)


def test_the_first_frame_of_a_gif():
    frames = [Image.fromarray(COLOUR // (k + 1)).quantize(64) for k in range(3)]
    data = saved(frames[0], "GIF", save_all=True, append_images=frames[1:])
    assert decode.header(data, "x") == (12, 20, 3, "uint8")
    assert np.array_equal(decode.decode(data, "x"), np.asarray(frames[0].convert("RGB")))


def test_integers_beyond_sixteen_bits_are_refused():
    within = np.arange(0, 65536, 273, dtype=np.int32).reshape(1, -1)
    assert np.array_equal(decode.decode(saved(Image.fromarray(within), "TIFF"), "x")[..., 0], within)
    for beyond, said in ((within * 6, "0 to 393120"), (within - 1, "-1 to")):
        with pytest.raises(BadImage, match=f"values from {said}.*expected 0 to 65535"):
            decode.decode(saved(Image.fromarray(beyond), "TIFF"), "x")


def test_pages_of_a_grey_tiff_are_channels():
    pages = [Image.fromarray(COLOUR[..., 0] // (k + 1)) for k in range(5)]
    data = saved(pages[0], "TIFF", save_all=True, append_images=pages[1:])
    assert decode.header(data, "x").channels == 5
    assert np.array_equal(decode.decode(data, "x")[..., 4], COLOUR[..., 0] // 5)


def test_pages_that_would_make_too_many_channels_are_refused():
    page = Image.fromarray(COLOUR[..., 0])
    data = saved(page, "TIFF", save_all=True, append_images=[page] * decode.MOST_CHANNELS)
    for read in (decode.header, decode.decode):
        with pytest.raises(BadImage, match=r"65 grey pages.*at most 64"):
            read(data, "x")


def test_transparency_is_laid_over_white():
    rgba = np.dstack([COLOUR, np.full((12, 20), 0, np.uint8)])
    rgba[:, :10, 3] = 255
    found = decode.decode(saved(Image.fromarray(rgba, "RGBA"), "PNG"), "x")
    assert np.array_equal(found[:, :10], COLOUR[:, :10])
    assert (found[:, 10:] == 255).all()


@pytest.mark.parametrize(("mode", "colour"), [("RGB", (200, 10, 20)), ("L", 100), ("1", 0)])
def test_a_transparent_colour_is_laid_over_white(mode, colour):
    image = Image.new(mode, (20, 12), colour)
    image.putpixel((3, 2), (1, 2, 3) if mode == "RGB" else 1)
    found = decode.decode(saved(image, "PNG", transparency=colour), "x")
    assert found.shape == (12, 20, 3 if mode == "RGB" else 1)
    assert found[2, 3].tolist() == {"RGB": [1, 2, 3], "L": [1], "1": [255]}[mode]
    assert (found == 255).all(2).sum() == 12 * 20 - (mode != "1")


def test_palette_and_bilevel():
    palette = Image.fromarray(COLOUR).quantize(16)
    assert np.array_equal(decode.decode(saved(palette, "PNG"), "x"), np.asarray(palette.convert("RGB")))
    bits = Image.fromarray(COLOUR[..., 0] > 127)
    assert np.array_equal(decode.decode(saved(bits, "PNG"), "x")[..., 0], (COLOUR[..., 0] > 127) * 255)


@pytest.mark.parametrize("format", ["PNG", "TIFF"])
def test_exif_orientation_is_applied(format):
    exif = Image.Exif()
    exif[0x0112] = 6  # a quarter turn clockwise to display
    data = saved(Image.fromarray(COLOUR), format, exif=exif)
    assert decode.header(data, "x")[:2] == (20, 12)
    assert np.array_equal(decode.decode(data, "x"), np.rot90(COLOUR, -1))


def photo(mode: str = "RGB", size: tuple[int, int] = (203, 121)) -> Image.Image:
    """Sharp edges in all colours beside noise: what chroma is scaled up by shows."""
    x, y = np.meshgrid(np.arange(size[0]), np.arange(size[1]))
    planes = np.stack([(x // 7 + y // 5) % 2 * 200, (x * y) % 251, RNG.integers(0, 256, x.shape)], 2)
    return Image.fromarray(planes.astype(np.uint8)).convert(mode)


def by_pil(data: bytes) -> np.ndarray:
    """A JPEG as PIL decodes it."""
    image = ImageOps.exif_transpose(Image.open(io.BytesIO(data)))
    image = image if image.mode in ("L", "RGB") else image.convert("RGB")
    return np.asarray(image).reshape(image.height, image.width, -1)


JPEGS = {
    **{f"subsampling {k}": {"subsampling": k} for k in range(3)},
    "progressive": {"progressive": True},
    "poor": {"quality": 5},
    "restart": {"restart_marker_blocks": 3},
    "kept as RGB": {"keep_rgb": True, "subsampling": 0},
    "with a comment": {"comment": b"x" * 3000},
}


@pytest.mark.parametrize("name", JPEGS)
@pytest.mark.parametrize("mode", ["RGB", "L", "CMYK"])
def test_a_jpeg_has_the_pixels_that_pil_gives_it(name, mode):
    data = saved(photo(mode), "JPEG", **JPEGS[name])
    assert np.array_equal(decode.decode(data, "x"), by_pil(data))


@pytest.mark.parametrize("orientation", range(9))
def test_a_turned_jpeg_is_set_upright(orientation):
    exif = Image.Exif()
    exif[0x0112] = orientation
    data = saved(photo(), "JPEG", exif=exif)
    found = decode.decode(data, "x")
    assert np.array_equal(found, by_pil(data))
    assert decode.header(data, "x")[:2] == found.shape[:2]


def test_the_first_picture_of_several_in_a_jpeg():
    data = saved(photo(), "MPO", save_all=True, append_images=[photo("L").convert("RGB")])
    assert np.array_equal(decode.decode(data, "x"), by_pil(data))


def test_colour_jpegs_need_no_pil_to_decode_and_others_do(monkeypatch):
    calls = []
    monkeypatch.setattr(decode, "_pixels", lambda image: calls.append(image.mode) or np.zeros((121, 203, 3), np.uint8))
    for mode in ("RGB", "L", "CMYK"):
        decode.decode(saved(photo(mode), "JPEG"), "x")
    assert calls == ["CMYK"]


@pytest.mark.parametrize("kept", [0.2, 0.5, 0.9, -40, -3, -2, -1])
def test_a_jpeg_cut_short_is_refused_as_pil_refuses_it(kept):
    whole = saved(photo(), "JPEG")
    data = whole[: int(kept * len(whole)) if 0 < kept < 1 else kept]
    try:
        expected = by_pil(data)
    except OSError:
        with pytest.raises(BadImage, match="truncated"):
            decode.decode(data, "x")
    else:
        assert np.array_equal(decode.decode(data, "x"), expected)


@pytest.mark.parametrize("orientation", range(1, 9))
def test_the_header_tells_the_size_of_what_is_decoded(orientation):
    exif = Image.Exif()
    exif[0x0112] = orientation
    data = saved(Image.fromarray(COLOUR), "PNG", exif=exif)
    assert decode.header(data, "x")[:2] == decode.decode(data, "x").shape[:2]


def test_bits_and_colours_are_rounded():
    deep = np.arange(65536, dtype=np.uint16).reshape(256, 256, 1)
    assert np.array_equal(decode.conform(deep, 1, np.dtype(np.uint8)), np.rint(deep / 257).astype(np.uint8))
    colour = RNG.integers(0, 256, (64, 64, 3), dtype=np.uint8)
    grey = decode.conform(colour, 1, np.dtype(np.uint8))[:, :, 0]
    assert (grey == np.asarray(Image.fromarray(colour).convert("L"))).mean() > 0.99
    assert np.array_equal(decode.from_array(colour[:, :, 0] > 99), 255 * (colour[:, :, :1] > 99).astype(np.uint8))


def test_what_is_no_image_is_told_plainly(tmp_path: Path):
    (tmp_path / "a.jpg").touch()
    for read in (decode.header, decode.decode):
        for empty in (b"", tmp_path / "a.jpg"):
            with pytest.raises(BadImage, match=r"^cannot read image x: it is empty$"):
                read(empty, "x")
        with pytest.raises(BadImage, match=r"x: its 13 bytes are none of JPEG, PNG, WEBP, TIFF, BMP, GIF$"):
            read(b"<html></html>", "x")


def test_npy(tmp_path: Path):
    for array in (COLOUR, GREY16, RNG.random((6, 7, 9)).astype(np.float32)):
        np.save(tmp_path / "a.npy", array)
        found = decode.decode(tmp_path / "a.npy", "a")
        assert found.dtype == array.dtype
        assert np.array_equal(found.squeeze(), array)
        assert decode.header(tmp_path / "a.npy", "a")[:3] == found.shape


@pytest.mark.parametrize(
    "array",
    [
        np.zeros((2, 3, 4, 5), np.uint8),
        np.array([{}], object),
        np.zeros((4, 4), np.int32),
        np.full((4, 4), np.nan),
    ],
)
def test_unusable_npy_names_the_file(tmp_path: Path, array):
    np.save(tmp_path / "odd.npy", array, allow_pickle=True)
    with pytest.raises(BadImage, match=r"odd\.npy"):
        decode.decode(tmp_path / "odd.npy", str(tmp_path / "odd.npy"))


@pytest.mark.parametrize("shape", [(9,), (2, 3, 4, 5), (0, 4)])
def test_header_of_an_array_that_is_no_image(tmp_path: Path, shape):
    np.save(tmp_path / "odd.npy", np.ones(shape, np.uint8))
    for look in (decode.header, decode.decode):
        with pytest.raises(BadImage, match=r"expected \(H, W\) or \(H, W, C\)"):
            look(tmp_path / "odd.npy", "odd.npy")


@pytest.mark.parametrize("keep", [0, 10, 0.6])
def test_broken_images_are_named(keep):
    data = saved(Image.fromarray(RNG.integers(0, 256, (64, 64, 3), dtype=np.uint8)), "JPEG")
    cut = data[: int(keep * len(data)) if keep < 1 else keep]
    with pytest.raises(BadImage, match=r"cats/7\.jpg"):
        decode.decode(cut, "cats/7.jpg")


def test_shrinking_keeps_what_views_need():
    assert decode.shrunk_size(100, 60, 64) == (100, 60)
    assert decode.shrunk_size(512, 512, 64) == (128, 128)
    assert decode.shrunk_size(300, 400, 64) == (128, 171)
    assert decode.shrunk_size(100, 1000, 64) == (64, 640)  # the shorter side is what a central crop shows
    assert decode.shrunk_size(2000, 8, 56) == (2000, 8)
    assert decode.shrunk_size(4000, 3000, None) == (4000, 3000)


def test_jpeg_is_decoded_at_reduced_size_to_the_same_picture():
    y, x = np.mgrid[:600, :900] / 100
    photo = np.stack([np.sin(x + k) * np.cos(y * (k + 1) / 2) for k in range(3)], 2) * 100 + 128
    data = saved(Image.fromarray(photo.astype(np.uint8)), "JPEG", quality=95)
    small = decode.decode(data, "x", target=40)
    assert small.shape == (80, 120, 3)
    reference = Image.fromarray(decode.decode(data, "x")).resize((120, 80), Image.Resampling.BICUBIC)
    assert np.abs(small.astype(float) - np.asarray(reference)).mean() < 1.5


@pytest.mark.parametrize("channels", [1, 3])
def test_shrinking_gives_pils_numbers(channels):
    image = np.asarray(photo("RGB"))[:, :, :channels]
    small = decode.resize(image, 70, 120).astype(int)
    plane = Image.fromarray(image[:, :, 0] if channels == 1 else image)
    theirs = np.asarray(plane.resize((120, 70), Image.Resampling.BICUBIC)).reshape(small.shape)
    assert np.abs(small - theirs).max() <= 2
    assert (small == theirs).mean() > 0.98


def test_resize_of_many_channels_is_that_of_each():
    stack = np.concatenate([COLOUR, COLOUR[:, :, :2]], axis=2)
    five = decode.resize(stack, 6, 9)
    three = decode.resize(COLOUR, 6, 9)
    assert np.abs(five[..., :3].astype(int) - three).max() <= 1


def test_conform():
    grey = COLOUR[..., :1]
    assert np.array_equal(decode.conform(grey, 3, np.dtype(np.uint8)), grey.repeat(3, 2))
    luminance = np.asarray(Image.fromarray(COLOUR).convert("L")).astype(int)
    assert np.abs(decode.conform(COLOUR, 1, np.dtype(np.uint8))[..., 0] - luminance).max() <= 1
    assert np.array_equal(decode.conform(grey, 1, np.dtype(np.uint16)), grey.astype(np.uint16) * 257)
    assert decode.conform(grey, 1, np.dtype(np.float32)).max() <= 1
    with pytest.raises(ValueError, match="5 channels"):
        decode.conform(np.zeros((2, 2, 5), np.uint8), 3, np.dtype(np.uint8))


def test_header_of_a_png_does_not_decode_it():
    data = saved(Image.fromarray(COLOUR), "PNG")
    assert decode.header(data[:60], "x") == (12, 20, 3, "uint8")
