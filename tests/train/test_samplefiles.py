"""Samples on disk: what is kept, continued, refused, and where it goes."""

import errno
import json
import os
import shlex
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from drive import network, take_place, together
from PIL import Image
from torch import Tensor

import residua
from residua import cli
from residua.data import Preprocessing
from residua.train import sample, samplefiles
from residua.train.checkpoint import weights_file, write_checkpoint
from residua.train.sample import Sampling, save_png
from residua.train.samplefiles import described, write_samples

QUICK = Sampling(steps=3)


def test_a_folder_grows_and_makes_nothing_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, out, made = network(), tmp_path / "samples", []
    real = samplefiles.generate

    def counted(model: Any, index: Tensor, *rest: Any) -> Tensor:
        made.extend(index.tolist())
        return real(model, index, *rest)

    monkeypatch.setattr(samplefiles, "generate", counted)
    write_samples(model, out, 5, QUICK, batch_size=2)
    (out / "000001.png").unlink()
    write_samples(model, out, 7, QUICK, batch_size=4)
    assert made == [0, 1, 2, 3, 4, 1, 5, 6]
    assert sorted(p.name for p in out.iterdir()) == [*(f"{i:06d}.png" for i in range(7)), "samples.json"]
    assert json.loads((out / "samples.json").read_text())["n"] == 7
    expected = sample.sample(model, 7, settings=QUICK)
    for i in range(7):
        image = torch.from_numpy(np.array(Image.open(out / f"{i:06d}.png"))).permute(2, 0, 1)
        assert int((image.int() - expected[i].int()).abs().max()) <= 1


def test_an_interrupted_folder_is_gone_on_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, made = network(num_classes=4), []
    real = samplefiles.generate

    def counted(model: Any, index: Tensor, *rest: Any) -> Tensor:
        if len(made) == 4:
            made.append(-1)
            raise KeyboardInterrupt
        made.extend(index.tolist())
        return real(model, index, *rest)

    monkeypatch.setattr(samplefiles, "generate", counted)
    with pytest.raises(KeyboardInterrupt):
        write_samples(model, tmp_path / "samples", 9, QUICK, batch_size=2)
    write_samples(model, tmp_path / "samples", 9, QUICK, batch_size=2)
    assert made == [0, 1, 2, 3, -1, 4, 5, 6, 7, 8]


def test_an_array_is_there_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, out = network(num_classes=4), tmp_path / "samples.npz"
    put = samplefiles.Rows.put

    def stop(rows: Any, index: np.ndarray, images: Tensor) -> None:
        put(rows, index, images)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(samplefiles.Rows, "put", stop)
        with pytest.raises(KeyboardInterrupt):
            write_samples(model, out, 9, QUICK, batch_size=2)
    assert list(tmp_path.iterdir()) == []
    (tmp_path / ".samples.npz.part").write_bytes(b"of one that was killed")
    write_samples(model, out, 9, QUICK, batch_size=2)
    assert list(tmp_path.iterdir()) == [out]
    stored = np.load(out)
    assert stored["arr_0"].dtype == np.uint8
    assert stored["labels"].tolist() == [0, 1, 2, 3, 0, 1, 2, 3, 0]
    images = torch.from_numpy(stored["arr_0"]).permute(0, 3, 1, 2)
    assert int((images.int() - sample.sample(model, 9, settings=QUICK).int()).abs().max()) <= 1


def test_an_array_that_is_there_has_enough_or_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, out = network(), tmp_path / "s.npz"
    write_samples(model, out, 3, QUICK)
    monkeypatch.setattr(samplefiles, "generate", lambda *_: pytest.fail("it samples"))
    before = out.read_bytes()
    for n in (2, 3):
        write_samples(model, out, n, QUICK)
    with pytest.raises(ValueError, match=r"s\.npz is there and holds 3 samples, not 4: remove it or choose another"):
        write_samples(model, out, 4, QUICK)
    assert out.read_bytes() == before
    assert described(out)["n"] == 3


def test_images_that_ignore_the_label_are_stored_without(tmp_path: Path) -> None:
    write_samples(network(num_classes=2), tmp_path / "s.npz", 2, replace(QUICK, guidance=0.0))
    assert "labels" not in np.load(tmp_path / "s.npz")


def test_every_file_has_its_own_description(tmp_path: Path) -> None:
    model = network()
    write_samples(model, tmp_path, 3, QUICK)
    write_samples(model, tmp_path / "samples.npz", 2, QUICK)
    write_samples(model, tmp_path / "samples.png", 1, replace(QUICK, seed=7))
    told = [described(tmp_path / name) for name in (".", "samples.npz", "samples.png")]
    assert [(made["n"], made["seed"]) for made in told] == [(3, 0), (2, 0), (1, 7)]
    np.savez(tmp_path / "other.npz", np.zeros(3))
    assert described(tmp_path / "other.npz") == described(tmp_path / "none.npz") == {}
    (tmp_path / "bad.npz").write_bytes((tmp_path / "samples.npz").read_bytes()[:400])
    with pytest.raises(ValueError, match=r"bad\.npz cannot be read, it may be damaged"):
        write_samples(model, tmp_path / "bad.npz", 2, QUICK)


def test_a_description_that_would_fill_the_memory_is_not_unpacked(tmp_path: Path) -> None:
    np.savez_compressed(tmp_path / "s.npz", arr_0=np.zeros((1, 8, 8, 3), np.uint8), about=np.array(" " * 5_000_000))
    assert (tmp_path / "s.npz").stat().st_size < 50_000
    with pytest.raises(
        ValueError, match=r"s\.npz cannot be read.*about unpacks to 19 MiB, expected no more than 16 MiB"
    ):
        described(tmp_path / "s.npz")


def test_a_picture_is_made_on_the_accelerators_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked, real = [], samplefiles.sample
    monkeypatch.setattr(samplefiles, "sample", lambda *a, **k: asked.append(k["device"]) or real(*a, **k))
    accelerator = SimpleNamespace(device=torch.device("cpu"), is_main_process=True)
    write_samples(network(), tmp_path / "s.png", 2, QUICK, accelerator=accelerator)
    write_samples(network(), tmp_path / "s.png", 2, QUICK, accelerator=accelerator, device="cpu")
    assert asked == [torch.device("cpu"), "cpu"]


@pytest.mark.parametrize("damage", ["{", "[1, 2]", '{"n": "two"}', None])
def test_a_damaged_description_is_named(tmp_path: Path, damage: str | None) -> None:
    """None: the number of samples is missing."""
    model = network()

    def damaged(about: str) -> str:
        known = json.loads(about)
        known.pop("n")
        return json.dumps(known) if damage is None else damage

    write_samples(model, tmp_path / "s", 2, QUICK)
    file = tmp_path / "s" / "samples.json"
    file.write_text(damaged(file.read_text()))
    write_samples(model, tmp_path / "s.npz", 2, QUICK)
    with np.load(tmp_path / "s.npz") as stored:
        about = damaged(str(stored["about"]))
        np.savez(tmp_path / "s.npz", arr_0=stored["arr_0"], about=np.array(about))
    for name, named in (("s", file), ("s.npz", tmp_path / "s.npz")):
        with pytest.raises(ValueError, match=rf"^{named} is damaged: remove it"):
            write_samples(model, tmp_path / name, 3, QUICK)


def test_places_that_cannot_be_written_are_refused_before_sampling(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sample, "_solve", lambda *_: pytest.fail("it samples"))
    for name in ("a.png", "a.npz"):
        (tmp_path / name).mkdir()
    (tmp_path / "file").write_text("in the way")
    before = sorted(tmp_path.rglob("*"))
    for name, says in {
        "a.png": r"a\.png is a folder, and a \.png file was asked for",
        "a.npz": r"a\.npz is a folder, and a \.npz file was asked for",
        "file": "file is a file, and samples are written to a folder",
        "file/s": "file is no folder",
        "file/s/s.png": "file is no folder",
        "c.jpg": r"folder, a \.npz",
    }.items():
        with pytest.raises(ValueError, match=says) as error:
            write_samples(network(), tmp_path / name, 2, QUICK)
        assert "\n" not in str(error.value)
    many = network(in_chans=5)
    many.preprocessing = Preprocessing((8, 8), (0.5,) * 5, (0.5,) * 5, 5)
    for name in ("s", "s.png"):
        with pytest.raises(ValueError, match=r"images of 5 channels are no PNGs: give --out NAME\.npz"):
            write_samples(many, tmp_path / name, 2, QUICK)
    assert sorted(tmp_path.rglob("*")) == before


def test_a_picture_that_fails_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "a.png").mkdir()
    with pytest.raises(OSError, match=r"a\.png"):
        save_png(torch.zeros(3, 4, 4, dtype=torch.uint8), tmp_path / "a.png")
    assert [p.name for p in tmp_path.iterdir()] == ["a.png"]


def test_suffixes_may_be_large(tmp_path: Path) -> None:
    for name in ("a.PNG", "b.NPZ"):
        write_samples(network(), tmp_path / name, 2, QUICK)
        assert (tmp_path / name).is_file()
        assert described(tmp_path / name)["n"] == 2
    assert np.load(tmp_path / "b.NPZ")["arr_0"].shape == (2, 8, 8, 3)


def test_a_full_disk_is_an_error_in_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    model, real = network(), os.posix_fallocate
    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(ValueError, match=r"s\.npz.*No space left.*choose another place \(residua sample --out\)"):
        write_samples(model, tmp_path / "s.npz", 2, QUICK)
    assert list(tmp_path.iterdir()) == []
    monkeypatch.setattr(os, "posix_fallocate", real)
    monkeypatch.setattr(np, "savez", full)
    with pytest.raises(ValueError, match=r"s\.npz.*No space left"):
        write_samples(model, tmp_path / "s.npz", 2, QUICK)
    assert list(tmp_path.iterdir()) == []


def test_samples_of_other_settings_are_not_mixed_in(tmp_path: Path) -> None:
    model = network()
    for name in ("a", "b.npz"):
        write_samples(model, tmp_path / name, 2, QUICK)
        write_samples(model, tmp_path / name, 2, QUICK)
        with pytest.raises(ValueError, match="other s"):
            write_samples(model, tmp_path / name, 2, Sampling(steps=4))
    other = network(embed_dim=16)
    next(other.parameters()).data.add_(1)
    for name, more in (("a", 3), ("b.npz", 2)):
        with pytest.raises(ValueError, match=r"other settings \(weights"):
            write_samples(other, tmp_path / name, 4, QUICK)
        write_samples(network(), tmp_path / name, more, QUICK, about={"checkpoint": "moved"})
    (tmp_path / "mine").mkdir()
    Image.new("RGB", (8, 8)).save(tmp_path / "mine" / "000000.png")
    with pytest.raises(ValueError, match="unknown"):
        write_samples(model, tmp_path / "mine", 2, QUICK)
    with pytest.raises(ValueError, match=r"folder, a \.npz"):
        write_samples(model, tmp_path / "c.jpg", 2, QUICK)


def share(run: str, out: str, rank: int, world: int, port: int) -> None:
    """One of several processes that sample together."""
    take_place(rank, world, port)
    status = cli.main(["sample", run, "-n", "7", "--steps", "2", "--batch-size", "2", "--device", "cpu", "--out", out])
    raise SystemExit(status)


def test_two_processes_share_the_numbers(run: Path, tmp_path: Path) -> None:
    out = tmp_path / "s.npz"
    assert together(share, str(run), str(out)) == [0, 0]
    images = torch.from_numpy(np.load(out)["arr_0"]).permute(0, 3, 1, 2)
    assert int((images.int() - sample.sample(residua.load(run), 7, steps=2).int()).abs().max()) <= 1


# ---------------------------------------------------------------- the command, and what is refused


def test_the_command_writes_what_score_reads(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from residua.evaluate.pictures import made_by, open_images

    args = ["sample", str(run), "-n", "4", "--steps", "2", "--device", "cpu", "--classes", "disc", "--guidance", "1.5"]
    assert cli.main([*args, "--out", str(tmp_path / "s")]) == 0
    said = capsys.readouterr().out
    assert "residua score" in said
    assert "earlier calls" not in said
    assert cli.main([*args, "--n", "2", "--out", str(tmp_path / "s")]) == 0  # the later -n is the one in force
    assert "s holds 4 samples, from earlier calls" in " ".join(capsys.readouterr().out.split())
    assert len(open_images(f"folder:{tmp_path / 's'}")) == 4
    known = made_by(f"folder:{tmp_path / 's'}")
    assert (known["sampler"], known["steps"], known["guidance"], known["classes"]) == ("dpm-solver", 2, 1.5, [0])
    assert known["checkpoint"].endswith("step-0000004/ema.safetensors")
    assert cli.main([*args, "--out", str(tmp_path / "s.npz")]) == 0
    assert made_by(str(tmp_path / "s.npz"))["seed"] == 0
    assert cli.main([*args, "--out", str(tmp_path / "s.png")]) == 0
    assert Image.open(tmp_path / "s.png").size == (34, 34)
    assert cli.main(args) == 0
    assert len(list((run / "samples").rglob("*.png"))) == 4


@pytest.mark.parametrize(("name", "kept"), [("s", "s"), ("s.npz", None), ("s.png", None)])
def test_interrupted_the_command_names_what_is_there(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any, name: str, kept: str | None
) -> None:
    def stop(*_: Any) -> None:
        raise KeyboardInterrupt

    for module in (sample, samplefiles):
        monkeypatch.setattr(module, "generate", stop)
    (tmp_path / "s.png").write_bytes(b"of before")
    args = ["sample", str(run), "-n", "4", "--steps", "2", "--device", "cpu", "--out", str(tmp_path / name)]
    assert cli.main(args) == 130
    out = "".join(capsys.readouterr().out.split("\n"))
    assert ("what is finished waits in" in out) == (kept is not None)
    if kept is not None:
        assert f"waits in {tmp_path / kept}, and the same command goes on from there" in out
        assert (tmp_path / kept).is_dir()
    monkeypatch.undo()
    assert cli.main(args) == 0


@pytest.mark.parametrize(("size", "side"), [((8, 8), ["8"]), ((8, 12), ["8", "12"])])
def test_the_command_for_scores_fits_data_of_mixed_sizes(
    tmp_path: Path, capsys: Any, size: tuple[int, int], side: list[str]
) -> None:
    (tmp_path / "my data").mkdir()
    for i, shape in enumerate([(20, 30), (40, 10), (16, 16)]):
        Image.new("RGB", shape, (i, 9, 9)).save(tmp_path / "my data" / f"{i}.png")
    model = network(img_size=size)
    model.preprocessing = Preprocessing(size, (0.5,) * 3, (0.5,) * 3)
    write_checkpoint(tmp_path / "run", 1, model, {})
    (tmp_path / "run" / "config.yaml").write_text(f"data: {{data: 'folder:{tmp_path / 'my data'}'}}\n")
    args = ["sample", str(tmp_path / "run"), "-n", "3", "--steps", "2", "--device", "cpu", "--out", "my samples"]
    assert cli.main(args) == 0
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("score:")]
    command = shlex.split(line.removeprefix("score:"))
    assert command[-len(side) - 3 :] == ["--reference-split", "train", "--img-size", *side]
    encoder: Any = residua.create_model("vit", img_size=8, patch_size=4, embed_dim=8, depth=1, num_heads=1)
    encoder.preprocessing = Preprocessing((8, 8), (0.5,) * 3, (0.5,) * 3)
    write_checkpoint(tmp_path / "encoder", 1, encoder, {})
    assert cli.main([*command[1:], "--extractor", str(tmp_path / "encoder"), "--no-cache", "--device", "cpu"]) == 0


def test_samples_of_many_channels_are_not_sent_to_score(tmp_path: Path, capsys: Any) -> None:
    model = network(in_chans=5)
    model.preprocessing = Preprocessing((8, 8), (0.5,) * 5, (0.5,) * 5, 5)
    write_checkpoint(tmp_path / "run", 1, model, {})
    assert cli.main(["sample", "run", "-n", "1", "--steps", "2", "--device", "cpu", "--out", "s.npz"]) == 0
    assert cli.main(["sample", "run", "-n", "1", "--steps", "2", "--device", "cpu"]) == 0
    assert "residua score" not in capsys.readouterr().out
    (made,) = (tmp_path / "run" / "samples").iterdir()
    assert np.load(made)["arr_0"].shape == np.load("s.npz")["arr_0"].shape == (1, 8, 8, 5)


def test_the_command_speaks_of_guidance_where_there_are_classes(run: Path, tmp_path: Path, capsys: Any) -> None:
    write_checkpoint(tmp_path / "unconditional", 1, network(), {})
    for model, says in ((run, "2 steps, guidance 1, seed 0)"), (tmp_path / "unconditional", "2 steps, seed 0)")):
        assert cli.main(["sample", str(model), "-n", "1", "--steps", "2", "--device", "cpu"]) == 0
        assert says in capsys.readouterr().out


def test_each_kind_of_samples_has_a_folder_of_its_own(run: Path, tmp_path: Path) -> None:
    mine = tmp_path / "mine"
    shutil.copytree(run, mine, ignore=shutil.ignore_patterns("samples"))

    def folders(*options: str) -> set[str]:
        there = {p.name for p in mine.glob("samples/*")}
        assert cli.main(["sample", str(mine), "-n", "2", "--steps", "2", "--device", "cpu", *options]) == 0
        return {p.name for p in mine.glob("samples/*")} - there

    (plain,) = folders()
    assert plain.startswith("step-0000004-dpm-solver-2-seed0-")
    assert not folders("-n", "3")
    assert not folders("--spacing", "logsnr", "--clip", "True", "--precision", "float32")
    for options, words in [
        (["--classes", "1"], "-seed0-classes1-"), (["--classes", "2", "disc"], "-seed0-classes2+0-"),
        (["--no-ema"], "-seed0-no-ema-"), (["--guidance", "2"], "-seed0-guidance2-"), (["--spacing", "uniform"], ""),
        (["--clip", "False"], ""), (["--precision", "bf16"], ""), (["--sampler", "ddim"], "-ddim-2-seed0-"),
    ]:  # fmt: skip
        (made,) = folders(*options)
        assert words in made
    model: Any = residua.load(mine)
    write_checkpoint(mine, 5, model, {})
    (later,) = folders()
    assert later.startswith("step-0000005-dpm-solver-2-seed0-")
    shutil.move(mine, tmp_path / "moved")
    mine = tmp_path / "moved"
    assert not folders()


def test_what_is_typed_is_how_samples_are_made(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[Any] = []
    monkeypatch.setattr(samplefiles, "write_samples", lambda *args, **options: called.append((args, options)))
    typed = (
        "-n 3 --out there --sampler ddim --steps 5 --guidance 2 --classes 1 2 --seed 4 --spacing uniform --clip False"
    )
    more = "--batch-size 6 --precision bf16 --compile --device cpu"
    assert cli.main(["sample", str(run), *typed.split(), *more.split()]) == 0
    ((_, out, n, settings), options) = called[0]
    assert (out, n) == (Path("there"), 3)
    assert settings == Sampling("ddim", 5, 2.0, (1, 2), 4, "uniform", clip=False, precision="bf16", compile=True)
    assert (options["batch_size"], options["device"]) == (6, "cpu")


def test_weights_elsewhere_do_not_share_a_folder(run: Path, tmp_path: Path) -> None:
    shutil.copy(weights_file(run), tmp_path / "model.safetensors")
    shutil.copy(weights_file(run, ema=False), tmp_path / "other.safetensors")
    for name in ("model", "other"):
        assert cli.main(["sample", f"{name}.safetensors", "-n", "1", "--steps", "2", "--device", "cpu"]) == 0
    assert sorted(p.name.split("-")[0] for p in Path("samples").iterdir()) == ["model", "other"]
