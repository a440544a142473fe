import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchvision.models import inception as torchvision_inception

from residua.evaluate import inception as module
from residua.evaluate.cache import weights_hash
from residua.evaluate.extractor import open_extractor
from residua.evaluate.inception import Inception, load_inception, resize_tf1


def resized_by_definition(image: np.ndarray, height: int, width: int) -> np.ndarray:
    """TensorFlow 1's resize_bilinear, a pixel at a time: align_corners and half_pixel_centers both False."""
    f = np.float32
    out = np.empty((height, width), f)
    for i in range(height):
        y = f(i) * f(image.shape[0] / height)
        top, bottom = int(y), min(int(y) + 1, image.shape[0] - 1)
        for j in range(width):
            x = f(j) * f(image.shape[1] / width)
            left, right = int(x), min(int(x) + 1, image.shape[1] - 1)
            dx, dy = x - f(left), y - f(top)
            upper = image[top, left] + (image[top, right] - image[top, left]) * dx
            lower = image[bottom, left] + (image[bottom, right] - image[bottom, left]) * dx
            out[i, j] = upper + (lower - upper) * dy
    return out


@pytest.mark.parametrize("shape", [(8, 8), (13, 29), (60, 50), (37, 41), (1, 3)])
def test_resizing_is_tensorflow_1s(shape: tuple[int, int]) -> None:
    image = np.random.default_rng(0).integers(0, 256, shape).astype(np.float32)
    found = resize_tf1(torch.from_numpy(image)[None, None].repeat(2, 3, 1, 1), 37, 41)
    np.testing.assert_array_equal(found[1, 2].numpy(), resized_by_definition(image, 37, 41))


def test_resizing_known_values() -> None:
    row = torch.tensor([0.0, 10.0])
    assert resize_tf1(row.reshape(1, 1, 1, 2), 1, 4).flatten().tolist() == [0, 5, 10, 10]
    assert resize_tf1(torch.arange(6.0).reshape(1, 1, 1, 6), 1, 3).flatten().tolist() == [0, 2, 4]
    assert resize_tf1(row.reshape(1, 1, 2, 1), 4, 1).flatten().tolist() == [0, 5, 10, 10]


@pytest.fixture(scope="module")
def state() -> dict[str, Tensor]:
    """Random weights under the names of the published files, scaled so that activations stay as large as they are."""
    model = torchvision_inception.Inception3(num_classes=1008, aux_logits=False, init_weights=False)
    g = torch.Generator().manual_seed(0)
    for module_ in model.modules():
        if isinstance(module_, nn.Conv2d):
            fan_in = module_.weight[0].numel()
            module_.weight.data = torch.randn(module_.weight.shape, generator=g) * (2 / fan_in) ** 0.5
        if isinstance(module_, nn.BatchNorm2d):
            module_.running_mean = 0.1 * torch.randn(module_.num_features, generator=g)
            module_.running_var = 0.5 + torch.rand(module_.num_features, generator=g)
            module_.bias.data = 0.1 * torch.randn(module_.num_features, generator=g)
    return model.state_dict()


@pytest.fixture(scope="module")
def file(state: dict[str, Tensor], tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("inception") / "weights.pth"
    torch.save(state, path)
    return path


def test_the_network_is_torchvisions_with_the_graphs_three_differences(state, file: Path, monkeypatch) -> None:
    model = load_inception(file)
    other = torchvision_inception.Inception3(num_classes=1008, aux_logits=False, init_weights=False).eval()
    other.load_state_dict(state)
    calls = []

    def pool(x: Tensor, kernel_size: int, stride: int, padding: int) -> Tensor:
        calls.append(x.shape)
        if len(calls) == 9:
            return F.max_pool2d(x, kernel_size, stride, padding)
        return plain(x, kernel_size, stride, padding, count_include_pad=False)

    plain = F.avg_pool2d
    images = torch.randint(0, 256, (1, 3, 40, 50), dtype=torch.uint8)
    other.dropout, other.fc = nn.Identity(), nn.Identity()
    with torch.inference_mode():
        found = model(images)
        monkeypatch.setattr(torchvision_inception.F, "avg_pool2d", pool)
        expected = other((resize_tf1(images.float(), 299, 299) - 128) / 128)
    assert len(calls) == 9
    assert found.shape == (1, 2048)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4 * float(expected.abs().max()))
    assert not model.published


@pytest.mark.parametrize("affine", [True, False])
def test_folding_is_the_convolution_and_its_normalisation(affine: bool) -> None:
    conv, norm, folded = nn.Conv2d(3, 5, 2, bias=False), nn.BatchNorm2d(5, eps=0.001).eval(), nn.Conv2d(3, 5, 2)
    for values in (norm.weight.data, norm.bias.data, norm.running_mean, norm.running_var):
        values.copy_(torch.rand(5) + 0.5)
    if not affine:
        norm.weight.data.fill_(1)
    parts = [conv.weight, norm.bias, norm.running_mean, norm.running_var]
    module._fold(folded, parts, norm.weight if affine else None, "a layer")
    x = torch.randn(2, 3, 4, 4)
    torch.testing.assert_close(folded(x), norm(conv(x)))


class Part(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x


def test_a_torchscript_file_gives_the_same_network(state, file: Path, tmp_path: Path) -> None:
    """Laid out as in the files in use: `layers.mixed_3.tower.conv_1.weight`, `.beta`, `.mean`, `.var`."""
    plain, script = load_inception(file), Part()
    script.layers, script.output = Part(), Part()
    script.output.weight = nn.Parameter(state["fc.weight"].T.clone())  # as a product with the features takes it
    for i, name in enumerate(plain.convolutions()):
        part = Part()
        for theirs, ours in (("weight", "conv.weight"), ("beta", "bn.bias"), ("mean", "bn.running_mean")):
            part.register_parameter(theirs, nn.Parameter(state[f"{name}.{ours}"]))
        part.var = nn.Parameter(state[f"{name}.bn.running_var"])
        where = {"Mixed_5b.branch1x1": "mixed", "Mixed_7c.branch1x1": "mixed_10"}.get(name)
        if where is None:
            setattr(script.layers, f"layer_{i}", part)
        else:
            setattr(script.layers, where, Part())
            getattr(script.layers, where).conv = part
    torch.jit.trace(script, torch.zeros(1)).save(tmp_path / "inception.pt")
    found = load_inception(tmp_path / "inception.pt")
    for name, conv in plain.convolutions().items():
        torch.testing.assert_close(found.convolutions()[name].weight, conv.weight, rtol=0, atol=0)
        torch.testing.assert_close(found.convolutions()[name].bias, conv.bias, rtol=0, atol=0)
    torch.testing.assert_close(found.classifier, state["fc.weight"])
    assert open_extractor("inception", tmp_path / "inception.pt").name == "Inception with weights inception.pt"
    with pytest.raises(ValueError, match=r"inception\.pt is a TorchScript file, a program.*--weights"):
        open_extractor(str(tmp_path / "inception.pt"))
    del script.layers.layer_1
    torch.jit.trace(script, torch.zeros(1)).save(tmp_path / "less.pt")
    with pytest.raises(ValueError, match=r"less\.pt: 93 convolutions, expected 94"):
        load_inception(tmp_path / "less.pt")


def test_only_distances_with_the_published_weights_are_fid(file: Path, monkeypatch) -> None:
    found = open_extractor("inception", file)
    assert (found.name, found.inception) == ("Inception with weights weights.pth", False)
    assert found.notes == (f"{file} does not hold the weights of 2015-12-05: this distance is comparable with no "
                           "published FID",)  # fmt: skip
    total = sum(float(conv.weight.double().abs().sum()) for conv in found.module.convolutions().values())
    for apart, same in ((1e-4, False), (-1e-4, False), (1e-6, True)):  # files may differ in their last digits
        monkeypatch.setattr(module, "_ABSOLUTE_SUM", total * (1 + apart))
        assert found.module.published is same
    known = open_extractor("inception", file)
    assert (known.name, known.inception, known.notes) == ("Inception 2015-12-05", True, ())
    assert known.identity["features"] == 2048


def test_the_classifier_is_taken_where_the_file_has_it(state, file: Path, tmp_path: Path) -> None:
    model = load_inception(file)
    torch.testing.assert_close(model.classifier, state["fc.weight"])
    torch.save({name: value for name, value in state.items() if not name.startswith("fc.")}, tmp_path / "less.pth")
    less = load_inception(tmp_path / "less.pth")
    assert less.classifier is None
    assert weights_hash(less) == weights_hash(model)  # what was kept of a reference serves both


def test_files_of_older_and_other_kinds(state, file: Path, tmp_path: Path) -> None:
    """pytorch-fid's was written before PyTorch's files were archives."""
    torch.save(state, tmp_path / "old.pth", _use_new_zipfile_serialization=False)
    torch.testing.assert_close(load_inception(tmp_path / "old.pth").state_dict(), load_inception(file).state_dict())
    with zipfile.ZipFile(tmp_path / "broken.pt", "w") as archive:
        archive.writestr("broken/code/net.py", "pass")
    with pytest.raises(ValueError, match=r"broken\.pt cannot be read as TorchScript"):
        load_inception(tmp_path / "broken.pt")


def test_94_convolutions_of_the_published_size() -> None:
    """Inception v3 has 23,834,568 parameters with 1,000 classes; a BatchNorm has two numbers where a bias is one."""
    convolutions = Inception().convolutions().values()
    assert len(convolutions) == 94
    channels = sum(conv.out_channels for conv in convolutions)
    assert sum(conv.weight.numel() for conv in convolutions) + 2 * channels == 23_834_568 - 2049 * 1000


def test_wrong_weights_are_refused(state, tmp_path: Path, monkeypatch) -> None:
    with pytest.raises(ValueError, match=r"no Inception weights at .*nowhere.pth; give --weights FILE .*: weights-inc"):
        load_inception(tmp_path / "nowhere.pth")
    torch.save({**state, "fc.weight": torch.zeros(1000, 2048)}, tmp_path / "torchvision.pth")
    with pytest.raises(ValueError, match=r"another Inception \(1000 classes"):
        load_inception(tmp_path / "torchvision.pth")
    torch.save({"weight": torch.zeros(3)}, tmp_path / "else.pth")
    with pytest.raises(ValueError, match=r"is not the Inception of 2015-12-05: Conv2d_1a_3x3\.conv\.weight is"):
        load_inception(tmp_path / "else.pth")
    torch.save({**state, "Mixed_5b.branch1x1.conv.weight": torch.zeros(2, 2, 1, 1)}, tmp_path / "shape.pth")
    with pytest.raises(ValueError, match=r"Mixed_5b.branch1x1 has weights of shape \(2, 2, 1, 1\)"):
        load_inception(tmp_path / "shape.pth")
    torch.jit.trace(Part(), torch.zeros(1)).save(tmp_path / "other.pt")
    with pytest.raises(ValueError, match="TorchScript file, but not of the Inception"):
        load_inception(tmp_path / "other.pt")

    asked = {}

    def offline(url: str, **options: object) -> None:
        asked.update(options)
        raise OSError("no route")

    monkeypatch.setattr(torch.hub, "load_state_dict_from_url", offline)
    with pytest.raises(ValueError, match=rf"could not be downloaded from {module.URL} \(no route\); give --weights"):
        load_inception()
    assert asked["check_hash"] is asked["weights_only"] is True


def test_a_pickled_program_is_not_run(tmp_path: Path) -> None:
    class Trap:
        def __reduce__(self):
            return (Path.touch, (tmp_path / "ran",))

    torch.save({"Conv2d_1a_3x3.conv.weight": Trap()}, tmp_path / "trap.pth")
    with pytest.raises(ValueError, match="cannot be read as weights"):
        load_inception(tmp_path / "trap.pth")
    assert not (tmp_path / "ran").exists()
