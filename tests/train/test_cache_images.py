"""Runs on images that are decoded once."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from drive import command_rank, differences, pretrain, small, small_classifier, small_diffusion, together
from PIL import Image

from residua import cli
from residua.data import DataError, load, store
from residua.data.errors import DataWarning
from residua.evaluate.pictures import Pictures
from residua.train import Pretrain, classify, diffuse, prepare
from residua.train.diffuse_config import rules
from residua.train.options import check

IMAGES = 24


@pytest.fixture
def photos(tmp_path: Path) -> str:
    """Larger than the stored side."""
    random = np.random.default_rng(0)
    for k in range(IMAGES):
        path = tmp_path / "photos" / "ab"[k % 2] / f"{k:02d}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        small = Image.fromarray(random.integers(0, 256, (9, 12, 3), dtype=np.uint8))
        small.resize((400, 300)).save(path)
    return f"folder:{tmp_path / 'photos'}"


def settings(photos: str, place: Path | str | None, **more: Any) -> dict[str, Any]:
    where = None if place is None else str(place)
    return {"data": photos, "img_size": 16, "steps": 2, "workers": 0, "resident": False, "cache_images": where} | more


def kept(run: Path) -> str | None:
    return Pretrain.read(run / "config.yaml").machine.cache_images


def test_training_reads_the_store_and_evaluation_the_images(photos: str, tmp_path: Path) -> None:
    session = prepare(small(tmp_path / "run", **settings(photos, tmp_path / "stores")))
    known = store.store_of(session.feed.source)
    assert known is not None
    assert (known.side, known.folder.parent) == (256, tmp_path / "stores")
    assert store.store_of(session.splits.train) is None
    assert ("store", f"decoded once, at 256 px on the shorter side: {known.folder}") in session.lines()
    assert session.preprocessing.mean == load(photos).train.stats()[0]
    session.close()
    assert known.size(0) == (256, 341)


@pytest.mark.parametrize(
    ("config", "ready"), [(small_classifier, classify.prepare), (small_diffusion, diffuse.prepare)]
)
def test_classifiers_and_diffusion_models_do_too(
    photos: str, tmp_path: Path, config: Callable[..., Any], ready: Callable[..., Any]
) -> None:
    given = ("resnet18", tmp_path / "run") if config is small_classifier else (tmp_path / "run",)
    session = ready(config(*given, **settings(photos, tmp_path / "stores"), batch_size=8))
    known = store.store_of(session.feed.source)
    assert known is not None
    assert session.objective() is not None
    session.close()
    if config is small_diffusion:
        with pytest.raises(DataError, match="comes from a store at 256 px"):
            Pictures(known.subset([1, 2]), 16)


def test_a_dry_run_says_what_a_store_would_take_and_makes_none(photos: str, tmp_path: Path) -> None:
    session = prepare(small(**settings(photos, tmp_path / "stores")))
    text = dict(session.lines())["store"]
    assert text.startswith("about 0.01 GiB at 256 px on the shorter side, in")
    assert not (tmp_path / "stores").exists()
    session.close()


def test_a_run_goes_on_with_its_store_wherever_that_lies(photos: str, tmp_path: Path) -> None:
    run, place = tmp_path / "run", tmp_path / "stores"
    pretrain(small(run, **settings(photos, place)))
    folder = Path(str(kept(run)))
    assert folder.parent == place
    again = small(run, **settings(photos, None), resume=True)
    for where, found in ((None, folder), (str(tmp_path / "moved"), tmp_path / "moved" / folder.name)):
        session = prepare(again.override(cache_images=where))
        known = store.store_of(session.feed.source)
        session.close()
        assert known is not None
        assert known.folder == found


def test_resume_is_exact_from_a_store_that_had_to_be_made_again(photos: str, tmp_path: Path) -> None:
    place, runs = tmp_path / "stores", [tmp_path / name for name in ("whole", "run")]
    for run in runs:
        pretrain(small(run, **settings(photos, place, steps=6)))
    last = runs[1] / "checkpoints" / "step-0000006"
    os.rename(last, tmp_path / "last")
    store.remove(store.stores_in(place)[0])
    pretrain(small(runs[1], **settings(photos, None, steps=6), resume=True))
    assert differences(*runs) == []


def test_resume_refuses_other_images_or_another_way(
    photos: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stored, plain = tmp_path / "stored", tmp_path / "plain"
    pretrain(small(stored, **settings(photos, tmp_path / "stores")))
    pretrain(small(plain, **settings(photos, None)))
    assert kept(plain) is None
    with pytest.raises(ValueError, match="begun with the images themselves"):
        prepare(small(plain, **settings(photos, tmp_path / "stores"), resume=True))
    with pytest.warns(DataWarning, match="begun with the images themselves, and goes on with them"):
        session = prepare(small(plain, **settings(photos, "auto"), resume=True))
    assert store.store_of(session.feed.source) is None
    session.close()
    again = small(stored, **settings(photos, None), resume=True)
    with pytest.raises(ValueError, match="begun with a store of its images"):
        prepare(again, given={"cache_images"})
    with monkeypatch.context() as patched:
        store.remove(store.stores_in(tmp_path / "stores")[0])
        patched.setattr(store.shutil, "disk_usage", lambda path: SimpleNamespace(free=0))
        with pytest.raises(DataError, match="are free in"):  # nor does it go on without
            prepare(again)
    Image.new("RGB", (400, 300)).save(tmp_path / "photos" / "a" / "00.jpg")
    with pytest.raises(DataError, match="is not the store of these images"):
        prepare(again)


def test_without_room_training_goes_on_without_a_store(
    photos: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store.shutil, "disk_usage", lambda path: SimpleNamespace(free=1000))
    with pytest.warns(DataWarning, match="Training goes on without a store"):
        pretrain(small(tmp_path / "run", **settings(photos, tmp_path / "stores")))
    assert kept(tmp_path / "run") is None
    pretrain(small(tmp_path / "plain", **settings(photos, None)))
    assert differences(tmp_path / "run", tmp_path / "plain") == []


def test_two_processes_build_one_store(photos: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    args = [
        "pretrain", "--data", photos, "--img-size", "16", "--size", "nano", "--patch-size", "4", "--embed-dim", "32",
        "--depth", "2", "--num-heads", "2", "--decoder-embed-dim", "16", "--decoder-depth", "1", "--batch-size", "8",
        "--decoder-num-heads", "2", "--steps", "2", "--cpu", "--no-evaluate",
        "--cache-images", str(tmp_path / "stores"), "--out", str(tmp_path / "run"),
    ]  # fmt: skip
    assert together(command_rank, args, tmp_path) == [0, 0]
    for rank in range(2):
        found = json.loads((tmp_path / f"{rank}.json").read_text())
        assert found["status"] == 0, found["wrong"]
    assert [known.state for known in store.stores_in(tmp_path / "stores")] == ["whole"]
    assert kept(tmp_path / "run") is not None


def test_latents_need_no_store() -> None:
    with pytest.raises(ValueError, match="latents are kept on disk as it is"):
        check(rules(small_diffusion(latents="vae", cache_images="auto")))


def test_scores_name_the_store(photos: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = tmp_path / "run"
    pretrain(small(run, **settings(photos, None)))
    place = ["--cache-images", str(tmp_path / "stores")]
    assert cli.main(["evaluate", str(run), "--device", "cpu", *place]) == 0, capsys.readouterr().err
    assert not (run / "evaluation.json").exists()
    known = store.stores_in(tmp_path / "stores")
    assert len(known) == 2
    found = json.loads((run / "evaluation-photos-stored.json").read_text())
    assert found["data"].startswith("photos, stored at 256 px (")
    assert all(each.folder.name[:8] in found["data"] for each in known)
    assert "stored at 256 px" in capsys.readouterr().out
    assert cli.main(["evaluate", str(run), "--data", "shapes?n=9&size=16", "--device", "cpu", *place]) == 2
    assert "leave --cache-images out" in capsys.readouterr().err
    out = tmp_path / "features.parquet"
    assert cli.main(["embed", str(run), "--data", photos, "--device", "cpu", "--out", str(out), *place]) == 0
    import pyarrow.parquet as pq

    assert "stored at 256 px" in json.loads(pq.read_schema(out).metadata[b"residua"])["data"]
    for k in range(IMAGES):
        mask = np.zeros((300, 400), np.uint8)
        mask[:, 200:] = 1
        (tmp_path / "masks").mkdir(exist_ok=True)
        Image.fromarray(mask).resize((1600, 1200), Image.Resampling.NEAREST).save(tmp_path / "masks" / f"{k:02d}.png")
    args = ["segment", str(run), "--masks", str(tmp_path / "masks"), "--device", "cpu", "--intra", "3", "--inter", "3"]
    assert cli.main([*args, *place]) == 0, capsys.readouterr().err
    assert "stored at 256 px" in json.loads((run / "segmentation-stored.json").read_text())["data"]
