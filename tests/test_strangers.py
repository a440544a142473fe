"""What a stranger sends is read, never run: every file here would leave a marker if some of its code ran."""

import io
import json
import os
import pickle
import re
import subprocess
import warnings
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import yaml
from PIL import EpsImagePlugin, Image

import residua
from residua import cli
from residua.adapt import names, open_model
from residua.adapt.names import read_weights
from residua.data import Preprocessing, decode
from residua.data.arrays import read_npz
from residua.data.latents import LatentSource
from residua.data.masks import read_mask
from residua.evaluate.cache import _checked
from residua.evaluate.extractor import open_extractor
from residua.evaluate.inception import load_inception
from residua.evaluate.pictures import open_images
from residua.evaluate.summary import published_statistics
from residua.evaluate.torchscript import ScriptedTensors, _Inert
from residua.train import Diffuse, Pretrain
from residua.train.checkpoint import read_checkpoint, write_checkpoint
from residua.train.options import read_flat
from residua.train.processes import program
from residua.train.samplefiles import described
from residua.train.session import _check_whole

OWN_CODE = r"the code that a folder or repository brings is not run here.*build the model in Python"
VIT = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 48, "image_size": 16}
TEXT = {"model_type": "llama", "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 32}


@pytest.fixture
def marker(tmp_path: Path) -> Path:
    return tmp_path / "marker"


@contextmanager
def refused(marker: Path, words: str) -> Iterator[None]:
    """First of all, nothing ran; and then there is an error that says so."""
    told = None
    try:
        yield
    except Exception as error:
        told = str(error)
    assert not marker.exists(), f"its code ran, and then came: {told}"
    assert told is not None, "it was opened"
    assert re.search(words, told), told


class Bomb:
    """Leaves the marker when it is unpickled."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> Any:
        return open, (str(self.marker), "w")


def write_code(folder: Path, marker: Path, text: str) -> None:
    """A module `evil` in a folder."""
    folder.mkdir(exist_ok=True)
    (folder / "evil.py").write_text(f"open({str(marker)!r}, 'w').close()\n{text}")


def leaves(marker: Path) -> Callable[..., Any]:
    def leave(*args: Any, **options: Any) -> Any:
        marker.touch()
        raise OSError("it was called")

    return leave


# ---------------------------------------------------------------- models of diffusers


@pytest.fixture
def pipeline(tmp_path: Path, marker: Path) -> Path:
    folder = tmp_path / "pipeline"
    write_code(folder, marker, "from diffusers import DiffusionPipeline\nclass Evil(DiffusionPipeline): pass\n")
    (folder / "config.json").write_text('{"_class_name": "DiffusionPipeline"}')
    (folder / "model_index.json").write_text('{"_class_name": ["evil", "Evil"]}')
    return folder


def test_a_pipeline_in_a_folder_is_not_opened(pipeline: Path, marker: Path, capsys: Any) -> None:
    pytest.importorskip("diffusers")
    status = cli.main(["evaluate", f"diffusers:{pipeline}", "--data", "shapes"])
    assert not marker.exists()
    assert status == 2
    assert "names no model of diffusers, but 'DiffusionPipeline'" in " ".join(capsys.readouterr().err.split())
    with refused(marker, "names no model of diffusers"):
        residua.load(f"diffusers:{pipeline}")


def test_of_diffusers_models_alone_are_opened(pipeline: Path, marker: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a folder and of the Hub; every name that the library has is tried."""
    diffusers = pytest.importorskip("diffusers")
    for function in ("from_pretrained", "from_config", "load_config"):
        monkeypatch.setattr(diffusers.DiffusionPipeline, function, leaves(marker))
        monkeypatch.setattr(diffusers.SchedulerMixin, function, leaves(marker), raising=False)
    monkeypatch.setattr("huggingface_hub.hf_hub_download", lambda name, file, **_: str(pipeline / file))
    others: list[Any] = [None, 1, ["evil", "Evil"], "evil.Evil"]
    for kind in dir(diffusers):
        try:
            found = getattr(diffusers, kind)
        except AttributeError:  # one that is listed and not there
            found = None
        except RuntimeError:  # one that cannot be imported with the other libraries that are here
            continue
        own = isinstance(found, type) and issubclass(found, diffusers.ModelMixin) and hasattr(found, "load_config")
        if not own:
            others.append(kind)
    assert len(others) > 300
    assert {"DiffusionPipeline", "AutoModel", "DDPMScheduler", "ConfigMixin", "ModelMixin"} <= {*others[4:]}
    for kind in others:
        (pipeline / "config.json").write_text(json.dumps({"_class_name": kind}))
        for name in (f"diffusers:{pipeline}", "diffusers:owner/name"):
            for pretrained in (True, False):
                with refused(marker, r"names no model of diffusers.*are not opened"):
                    open_model(name, pretrained=pretrained)


# ---------------------------------------------------------------- models of transformers


def write_transformers(folder: Path, marker: Path, config: dict[str, Any]) -> str:
    """A folder whose `auto_map` names code beside it, and an answer for a question about it."""
    text = (
        "from transformers import AutoModel, PretrainedConfig, ViTImageProcessor, ViTModel\n"
        "class EvilConfig(PretrainedConfig):\n    model_type = 'evil'\n"
        "class Evil(ViTModel): pass\nclass EvilProcessor(ViTImageProcessor): pass\n"
    )
    write_code(folder, marker, text)
    autos = {"AutoConfig": "EvilConfig", "AutoModel": "Evil", "AutoImageProcessor": "EvilProcessor"}
    code = {"auto_map": {auto: f"evil.{name}" for auto, name in autos.items()}}
    (folder / "config.json").write_text(json.dumps(config | code))
    (folder / "preprocessor_config.json").write_text(json.dumps({"image_processor_type": "EvilProcessor"} | code))
    return f"transformers:{folder}"


@pytest.fixture
def answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """On standard input, to whatever is asked."""
    monkeypatch.setattr("sys.stdin", io.StringIO("y\n" * 20))


@pytest.fixture(params=["never asked", "asked"])
def guard(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Each call refuses by itself, too, where the library would ask."""
    if request.param == "asked":
        monkeypatch.setattr(names, "_without_code", lambda name: nullcontext())
    return request.param == "never asked"


@pytest.mark.parametrize("pretrained", [True, False])
@pytest.mark.parametrize("kind", ["evil", "aimv2_text_model"])  # the second has a configuration, and no class
@pytest.mark.usefixtures("answer")
def test_a_model_that_is_code_is_not_opened(
    kind: str, pretrained: bool, guard: bool, tmp_path: Path, marker: Path
) -> None:
    pytest.importorskip("transformers")
    name = write_transformers(tmp_path / "model", marker, {"model_type": kind})
    with refused(marker, OWN_CODE if guard else "trust_remote_code|custom code"):
        open_model(name, pretrained=pretrained)


@pytest.mark.usefixtures("answer")
def test_a_model_that_is_code_is_refused_at_the_command_line(tmp_path: Path, marker: Path, capsys: Any) -> None:
    pytest.importorskip("transformers")
    name = write_transformers(tmp_path / "model", marker, {"model_type": "evil"})
    status, printed = cli.main(["evaluate", name, "--data", "shapes"]), capsys.readouterr()
    assert not marker.exists()
    assert status == 2
    assert "is not run here" in " ".join(printed.err.split())
    assert "published weights" not in printed.err
    assert "[y/N]" not in printed.out + printed.err


@pytest.mark.usefixtures("answer")
def test_code_of_a_part_of_a_model_is_not_run(tmp_path: Path, marker: Path) -> None:
    """What the library is told of the whole it does not hand on to the parts."""
    pytest.importorskip("transformers")
    folder = tmp_path / "model"
    write_transformers(folder, marker, {})
    part = {"model_type": "aimv2_text_model", "auto_map": {"AutoModel": "evil.Evil"}, "_name_or_path": str(folder)}
    (folder / "config.json").write_text(json.dumps({"model_type": "llava", "vision_config": part, "text_config": TEXT}))
    torch.save({"x": torch.ones(1)}, folder / "pytorch_model.bin")
    for pretrained in (True, False):
        with refused(marker, OWN_CODE):
            open_model(f"transformers:{folder}", pretrained=pretrained)


@pytest.mark.usefixtures("answer")
def test_what_the_library_has_a_class_for_is_opened_with_that(tmp_path: Path, marker: Path) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.ViTConfig(**VIT, patch_size=4)
    transformers.ViTModel(config).save_pretrained(tmp_path / "model")
    name = write_transformers(tmp_path / "model", marker, config.to_dict())
    for options in ({}, {"pretrained": False}, {"weights": tmp_path / "model" / "model.safetensors"}):
        model = open_model(name, **options)
        assert not marker.exists()
        assert type(model) is transformers.ViTModel


@pytest.mark.usefixtures("answer")
def test_a_processor_that_is_code_is_left_out(
    guard: bool, tmp_path: Path, marker: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a repository of the Hub, which a folder stands for here."""
    transformers = pytest.importorskip("transformers")
    write_transformers(tmp_path / "model", marker, {"model_type": "evil"})
    own, config = transformers.AutoImageProcessor.from_pretrained, transformers.ViTConfig(**VIT, patch_size=4)
    monkeypatch.setattr(transformers.PretrainedConfig, "get_config_dict", lambda *_, **__: ({}, {}))
    monkeypatch.setattr(transformers.AutoConfig, "from_pretrained", lambda *_, **__: config)
    monkeypatch.setattr(
        transformers.AutoImageProcessor, "from_pretrained", lambda _, **options: own(str(tmp_path / "model"), **options)
    )
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        model: Any = open_model("transformers:owner/model", pretrained=False)
    assert not marker.exists()
    assert "its image processor is code, which is not run here" in " ".join(str(one.message) for one in told)
    assert model.preprocessing.mean == pytest.approx((0.485, 0.456, 0.406))


@pytest.mark.parametrize("library", names.LIBRARIES)
def test_there_is_no_option_to_trust(library: str) -> None:
    with pytest.raises(ValueError, match=OWN_CODE):
        open_model(f"{library}:owner/name", trust_remote_code=True)


@pytest.mark.parametrize("key", ["attn_implementation", "_attn_implementation", "experts_implementation"])
@pytest.mark.parametrize("inner", [False, True])
def test_kernels_of_a_repository_are_not_fetched(
    key: str, inner: bool, tmp_path: Path, marker: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A configuration may name code of the Hub that computes attention; the library fetches it where it can."""
    transformers = pytest.importorskip("transformers")
    from transformers.integrations import hub_kernels

    monkeypatch.setattr(hub_kernels, "load_and_register_attn_kernel", leaves(marker))
    described = transformers.ViTConfig(**VIT, patch_size=4).to_dict()
    kernel = {key: "owner/kernel@main"}
    described |= {"vision_config": [kernel]} if inner else kernel
    (tmp_path / "config.json").write_text(json.dumps(described))
    for pretrained in (True, False):
        with refused(marker, OWN_CODE):
            open_model(f"transformers:{tmp_path}", pretrained=pretrained)


# ---------------------------------------------------------------- weights and runs


def test_modules_in_the_working_directory_are_not_imported(
    tmp_path: Path, marker: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where a command starts others, inside a folder of images that has files of Python, too."""
    for name in ("tyro", "yaml", "numpy", "torch"):
        (tmp_path / f"{name}.py").write_text(f"open({str(marker)!r}, 'w').close()\nraise SystemExit(1)\n")
    monkeypatch.chdir(tmp_path)
    done = subprocess.run([*program(), "--version"], capture_output=True, text=True, check=False)
    assert not marker.exists()
    assert done.stdout.split()[-1] == residua.__version__


def test_pickles_in_a_models_folder_are_not_run(tmp_path: Path, marker: Path) -> None:
    """timm's, transformers' and diffusers', each read by its library."""
    transformers, diffusers = pytest.importorskip("transformers"), pytest.importorskip("diffusers")
    bomb = {"weight": Bomb(marker)}
    config = {"architecture": "test_vit", "num_classes": 10, "pretrained_cfg": {"tag": "x"}}
    (tmp_path / "timm").mkdir()
    (tmp_path / "timm" / "config.json").write_text(json.dumps(config))
    transformers.ViTConfig(**VIT, patch_size=4).save_pretrained(tmp_path / "transformers")
    sizes = {"num_attention_heads": 2, "attention_head_dim": 8, "num_layers": 1, "sample_size": 8}
    diffusers.DiTTransformer2DModel(**sizes).save_config(tmp_path / "diffusers")
    files = {
        f"timm:local-dir:{tmp_path}/timm": "timm/pytorch_model.bin",
        f"transformers:{tmp_path}/transformers": "transformers/pytorch_model.bin",
        f"diffusers:{tmp_path}/diffusers": "diffusers/diffusion_pytorch_model.bin",
    }
    for name, file in files.items():
        assert isinstance(open_model(name, pretrained=False), torch.nn.Module)  # but for its weights, it opens
        for zipped in (True, False):
            torch.save(bomb, tmp_path / file, _use_new_zipfile_serialization=zipped)
            with refused(marker, "published weights cannot be had"):
                open_model(name)


@pytest.mark.parametrize("zipped", [True, False])
def test_pickles_in_a_file_of_weights_are_not_run(zipped: bool, tmp_path: Path, marker: Path) -> None:
    file = tmp_path / "pytorch_model.bin"
    torch.save({"cls_token": Bomb(marker)}, file, _use_new_zipfile_serialization=zipped)
    readers: list[Callable[[], Any]] = [
        lambda: read_weights(file), lambda: residua.load(file), lambda: residua.load(tmp_path),
        lambda: open_model("timm:test_vit", weights=file),
    ]  # fmt: skip
    for read in readers:
        with refused(marker, "cannot be read as weights"):
            read()


@pytest.mark.parametrize("zipped", [True, False])
def test_a_training_state_is_not_run(zipped: bool, tmp_path: Path, marker: Path) -> None:
    model = residua.create_model("vit", img_size=8, patch_size=4, embed_dim=8, depth=1, num_heads=2)
    model.preprocessing = Preprocessing((8, 8), (0.5,) * 3, (0.5,) * 3)
    folder = write_checkpoint(tmp_path, 1, model, {"step": 1})
    assert read_checkpoint(folder, ema=False)[2] == {"step": 1}
    torch.save({"step": Bomb(marker)}, folder / "training.pt", _use_new_zipfile_serialization=zipped)
    with refused(marker, "is damaged or not complete"):
        read_checkpoint(folder, ema=False)


def test_settings_are_read_as_plain_yaml(tmp_path: Path, marker: Path) -> None:
    (tmp_path / "checkpoints").mkdir()
    settings = tmp_path / "config.yaml"
    Pretrain().save(settings)
    settings.write_text(settings.read_text() + f"x: !!python/object/apply:builtins.open [{str(marker)!r}, w]\n")
    for options in ([str(settings)], ["--resume", "--out", str(tmp_path)]):
        status = cli.main(["pretrain", *options, "--data", "shapes", "--cpu"])
        assert not marker.exists()
        assert status == 2
    for read in (lambda: read_flat(settings), lambda: _check_whole(Pretrain(), settings)):
        with refused(marker, "could not determine a constructor"):
            read()


# ---------------------------------------------------------------- TorchScript


class Script(torch.nn.Module):
    """Writes over the marker, or makes it, when it is loaded."""

    def __init__(self, marker: Path) -> None:
        super().__init__()
        self.marker, self.x = str(marker), torch.zeros(1)

    @torch.jit.export
    def __getstate__(self) -> tuple[str, bool]:
        return self.marker, self.training

    @torch.jit.export
    def __setstate__(self, state: tuple[str, bool]) -> None:
        self.marker, self.training = state
        self.x = torch.from_file(self.marker, True, 1).fill_(1.0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.mean([2, 3])


@pytest.fixture
def script(tmp_path: Path, marker: Path) -> Path:
    file = tmp_path / "script.pt"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.jit.script(Script(marker)).save(file)
        torch.jit.load(file)
    assert marker.exists()  # so does PyTorch by itself
    marker.unlink()
    return file


@pytest.fixture
def images(tmp_path: Path) -> Path:
    (tmp_path / "images").mkdir()
    for i in range(8):
        pixels = np.random.default_rng(i).integers(0, 256, (8, 8, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(tmp_path / "images" / f"{i}.png")
    return tmp_path / "images"


NOT_RUN = r"cannot be read as TorchScript without running it"
A_PROGRAM = "a TorchScript file, a program, which is not run"


def test_weights_in_torchscript_are_not_run(script: Path, images: Path, marker: Path, capsys: Any) -> None:
    readers: list[Callable[[], Any]] = [
        lambda: load_inception(script), lambda: open_extractor("inception", script),
        lambda: open_extractor(str(script)), lambda: open_extractor("timm:test_vit", script),
        lambda: read_weights(script), lambda: residua.load(script), lambda: open_model("timm:test_vit", weights=script),
    ]  # fmt: skip
    for read in readers:
        with refused(marker, rf"{NOT_RUN}|{A_PROGRAM}|cannot be read as weights|TorchScript archives"):
            read()
    given = ["--reference", str(images), "--no-cache", "--device", "cpu"]
    status = cli.main(["score", str(images), *given, "--weights", str(script)])
    assert not marker.exists()
    assert status == 2
    assert "without running it" in " ".join(capsys.readouterr().err.split())


def write_archive(file: Path, content: bytes) -> Path:
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, record in (("data.pkl", content), ("code/__torch__.py", b""), ("constants.pkl", b"\x80\x02).")):
            archive.writestr(f"net/{name}", record)
    return file


def test_pickles_in_torchscript_are_not_run(tmp_path: Path, marker: Path) -> None:
    """Nor does it leave anything behind what a file does with the few names that are known."""
    known = b"ctorch._utils\n_rebuild_tensor_v2\n"
    of_the_class = b"c__torch__\nNet\n(N}X\x08\x00\x00\x00__init__" + known + b"stb."
    contents = {
        r"holds _?io\.open, which is not loaded as it may run code": pickle.dumps(Bomb(marker)),
        r"holds torch\.load": b"ctorch\nload\n(X\x01\x00\x00\x00xtR.",
        r"data\.pkl is larger than": pickle.dumps(bytes(2**24)),
        r"not of the Inception": of_the_class,
    }
    before = dict(vars(_Inert))
    for words, content in contents.items():
        file = write_archive(tmp_path / "net.pt", content)
        with refused(marker, words):
            load_inception(file)
    assert dict(vars(_Inert)) == before


def test_tensors_of_torchscript_are_no_larger_than_their_records(tmp_path: Path) -> None:
    """A shape may say more than there is, by strides of nothing."""
    storage = b"(X\x07\x00\x00\x00storagectorch\nFloatStorage\nX\x01\x00\x00\x000X\x03\x00\x00\x00cpuK\x01tQ"
    for shape, fits in ((b"(K\x01t", True), (b"(J\x00\x00\x00\x7ft", False)):
        tensor = b"ctorch._utils\n_rebuild_tensor_v2\n(" + storage + b"K\x00" + shape + b"(K\x00t\x89NtR"
        file = write_archive(
            tmp_path / "net.pt", b"\x80\x02c__torch__\nNet\n)\x81}X\x01\x00\x00\x00w" + tensor + b"sb."
        )
        with zipfile.ZipFile(file, "a") as archive:
            archive.writestr("net/data/0", np.float32(3).tobytes())
        tensors = ScriptedTensors(file)
        if fits:
            assert tensors.read(["w"])[0].tolist() == [3]
        else:
            with pytest.raises(ValueError, match=rf"{NOT_RUN}: data/0 holds 1 numbers of a tensor of shape"):
                tensors.read(["w"])


def test_training_runs_no_extractor(script: Path, tmp_path: Path, marker: Path, capsys: Any) -> None:
    """Of a run's own settings, of a file of settings, or typed."""
    run, settings = tmp_path / "run", tmp_path / "settings.yaml"
    small = {
        "data": "shapes?n=8&size=8&test=4", "size": "nano", "patch_size": 4, "embed_dim": 16, "depth": 2,
        "num_heads": 2, "steps": 1, "batch_size": 8, "cpu": True, "trackers": (),
    }  # fmt: skip
    config = Diffuse().override(**small)
    config.save(settings)
    measured = ["--fid-every", "1", "--sample-every", "1", "--fid-samples", "4", "--samples", "1"]
    assert cli.main(["diffuse", str(settings), "--out", str(run), "--sample-every", "0"]) == 0
    theirs = yaml.safe_load((run / "config.yaml").read_text())
    theirs["machine"] |= {"fid_extractor": str(script), "fid_every": 1.0, "sample_every": 1.0, "fid_samples": 4}
    (run / "config.yaml").write_text(yaml.safe_dump(theirs))
    config.override(fid_extractor=str(script)).save(settings)
    for options in (
        ["--resume", "--out", str(run)],
        [str(settings), "--out", str(tmp_path / "other"), *measured],
        [str(settings), "--out", str(tmp_path / "third"), *measured, "--fid-extractor", str(script)],
    ):
        capsys.readouterr()
        status = cli.main(["diffuse", *options])
        assert not marker.exists()
        assert status == 2
        assert A_PROGRAM in " ".join(capsys.readouterr().err.split())


def test_sweeps_run_no_extractor(
    script: Path, images: Path, tmp_path: Path, marker: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    """Typed, or as the folder of the sweep has it."""

    scored: list[int] = []

    def run(plan: Any, *_: Any) -> None:
        if plan.score:  # as a run of it would be scored
            scored.append(cli.main(["score", str(images), "--reference", str(images), "--no-cache", *plan.score]))

    monkeypatch.setattr("residua.recipes.sweep.run", run)
    folder = tmp_path / "sweep"
    args = ["sweep", "uvit-shapes", "--alpha-min", "1.0", "0.7", "--cpu", "--out", str(folder)]
    assert cli.main(args) == 0
    stored = json.loads((folder / "sweep.json").read_text())
    for score in (
        ["--extractor", str(script)],
        [f"--extractor={script}"],
        ["--extractor", "x", "--extractor", str(script)],
    ):
        (folder / "sweep.json").write_text(json.dumps(stored | {"score": [*score, "--device", "cpu"]}))
        capsys.readouterr()
        cli.main(args)
        assert not marker.exists()
        assert scored.pop() == 2
        assert A_PROGRAM in " ".join(capsys.readouterr().err.split())
    status = cli.main([*args[:-1], str(tmp_path / "new"), "--score", "8", "--fid-extractor", str(script)])
    assert not marker.exists()
    assert status == 2


# ---------------------------------------------------------------- images and arrays


def test_pickles_in_arrays_are_not_run(tmp_path: Path, marker: Path) -> None:
    objects = np.array([[Bomb(marker)]], dtype=object)
    folder = tmp_path / "latents"
    folder.mkdir()
    for place in (tmp_path / "x.npy", folder / "index.npy"):
        np.save(place, objects, allow_pickle=True)
    keys = ("arr_0", "mu", "sigma", "about")
    np.savez(tmp_path / "x.npz", allow_pickle=True, **dict.fromkeys(keys, objects))  # type: ignore[arg-type]
    array, archive = tmp_path / "x.npy", tmp_path / "x.npz"
    bare = tmp_path / "bare.npy"  # a pickle by itself, which numpy takes, too, where it takes any
    bare.write_bytes(pickle.dumps(Bomb(marker)))
    images: Any = None
    readers: list[Callable[[], Any]] = [
        lambda: decode.decode(array, "x"), lambda: decode.header(array, "x"), lambda: decode.decode(bare, "x"),
        lambda: decode.header(bare, "x"), lambda: read_mask(array), lambda: read_mask(bare),
        lambda: Preprocessing((8, 8), (0.5,), (0.5,), 1)(array), lambda: read_npz(archive, "arr_0"),
        lambda: open_images(str(archive)), lambda: open_images(str(array)), lambda: open_images(str(bare)),
        lambda: published_statistics(str(archive)), lambda: described(archive),
        lambda: LatentSource(images, folder),
        lambda: _checked(bare, [1], ""), lambda: _checked(bare, [1], "", mapped=False),
        lambda: residua.data.load(f"folder:{tmp_path}").train.read(0),
    ]  # fmt: skip
    for read in readers:
        with refused(marker, r"allow_pickle|damaged|cannot be read|[Pp]ython objects|pickled"):
            read()


EPS = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 8 8\n%%EndComments\nshowpage\n"


@pytest.fixture
def ghostscript(tmp_path: Path, marker: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A program of that name, which leaves the marker."""
    program = tmp_path / "bin" / "gs"
    program.parent.mkdir()
    program.write_text(f"#!/bin/sh\ntouch '{marker}'\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setattr(EpsImagePlugin, "gs_binary", None)
    with pytest.raises(Exception), Image.open(io.BytesIO(EPS)) as image:  # noqa: B017
        image.load()
    assert marker.exists()  # so would Pillow by itself
    marker.unlink()


@pytest.mark.usefixtures("ghostscript")
def test_images_of_formats_that_start_programs_are_not_opened(tmp_path: Path, marker: Path) -> None:
    folder, rows = tmp_path / "images", tmp_path / "rows"
    for place in (folder, rows):
        place.mkdir()
    file = folder / "x.png"
    file.write_bytes(EPS)
    table = pa.table({"image": [{"bytes": EPS, "path": None}, {"bytes": None, "path": "../images/x.png"}]})
    pq.write_table(table, rows / "train.parquet")
    pq.write_table(table, tmp_path / "train.parquet")
    pre = Preprocessing((8, 8), (0.5,) * 3, (0.5,) * 3)
    readers: list[Callable[[], Any]] = [
        lambda: decode.decode(EPS, "x"), lambda: decode.decode(file, "x"), lambda: decode.header(file, "x"),
        lambda: read_mask(file), lambda: pre(str(file)), lambda: residua.data.load(f"folder:{folder}").train.read(0),
        lambda: residua.data.load(f"parquet:{rows}").train.read(0), lambda: open_images(str(folder)).read(0),
        lambda: residua.data.load(f"parquet:{rows}").train.read(1),
    ]  # fmt: skip
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for read in readers:
            with refused(marker, r"are none of JPEG|leads out of the folder|none of the"):
                read()
