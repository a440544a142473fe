"""`--init`: what a run takes over from the model whose weights it starts from."""

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from drive import pretrain, small

import residua
from residua.train import Pretrain, prepare
from residua.train.start import as_in

OPEN = {"data": "shapes?n=40&size=16", "steps": 2, "cpu": True, "trackers": (), "dry_run": True}
IMAGES = torch.rand(2, 3, 16, 16)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("runs") / "trained"
    pretrain(small(run, steps=2, depth=4, schedule="cosine", per="block", anneal=0.0))
    return run


def started(init: Path, *given: str, **settings: Any) -> Any:
    return prepare(Pretrain().override(**OPEN | {"init": str(init)} | settings), given=given)


def same_features(model: Any, other: Any) -> bool:
    with torch.no_grad():
        return torch.equal(model.encoder(IMAGES), other.encoder(IMAGES))


def test_what_is_left_open_is_as_in_the_model(trained: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        session = started(trained)
    before: Any = residua.load(trained)
    assert same_features(session.model, before)
    assert torch.equal(session.model.decoder.pred.weight, before.decoder.pred.weight)
    own, s = session.config.model, session.config.shortcut
    assert (own.embed_dim, own.depth, own.patch_size, own.decoder_depth) == (32, 4, 4, 1)
    assert (s.alpha_min, s.schedule, s.per) == (0.7, "cosine", "block")


@pytest.mark.parametrize(
    ("given", "settings", "found"),
    [
        ((), {"alpha_min": 0.8}, (0.8, None, "cosine", "none")),
        ((), {"alpha_eff": 0.5}, (1.0, 0.5, "cosine", "none")),
        (("schedule",), {}, (0.7, None, "linear", "none")),
        ((), {"control": "branch"}, (1.0, None, "linear", "branch")),
        ((), {"anneal": 0.5}, (0.7, None, "cosine", "none")),
    ],
)
def test_other_shortcuts_hold_and_are_told(trained: Path, given: Any, settings: Any, found: Any) -> None:
    with pytest.warns(UserWarning, match="features change with them"):
        s = started(trained, *given, **settings).config.shortcut
    assert (s.alpha_min, s.alpha_eff, s.schedule, s.control) == found


def test_learned_shortcuts_go_on(tmp_path: Path) -> None:
    model = pretrain(small(tmp_path / "run", schedule="learned", alpha_min=1.0, anneal=0.0, lr=0.05, ema=None))
    assert float(model.encoder.shortcut.alpha.min()) < 1.0
    session = started(tmp_path / "run")
    assert same_features(session.model, model)
    with pytest.warns(UserWarning, match="alpha_min learned there, 1 here"):
        started(tmp_path / "run", "schedule")


def test_published_weights_have_ordinary_shortcuts(tmp_path: Path) -> None:
    model: Any = residua.create_model("vit_tiny", img_size=32, patch_size=8)
    file = tmp_path / "mae_pretrain_vit_tiny.pth"
    state = {name: value for name, value in model.state_dict().items() if "alpha" not in name}
    torch.save({"model": state}, file)
    with pytest.warns(UserWarning, match="it has no decoder") as told:
        session = started(file, data="shapes?n=40&size=32", steps=10**5)  # for which auto is below 1 otherwise
    assert len(told) == 1
    config = session.config
    assert (config.model.size, config.model.patch_size, config.shortcut.alpha_min) == ("tiny", 8, 1.0)
    with pytest.warns(UserWarning, match=r"alpha_min 1 there, 0.8 here"):
        started(file, data="shapes?n=40&size=32", alpha_min=0.8)


def test_what_is_given_is_not_taken_over() -> None:
    there = {
        "name": "mae_vit", "img_size": [32, 32], "patch_size": [4, 4], "embed_dim": 192, "depth": 12, "num_heads": 3,
        "decoder": "ushape", "decoder_embed_dim": 8, "decoder_depth": 2, "decoder_num_heads": 2,
    }  # fmt: skip
    taken = as_in(Pretrain(), there)
    assert (taken.model.size, taken.model.decoder_embed_dim, taken.model.patch_size) == ("tiny", 8, 4)
    given = as_in(Pretrain().override(size="small", patch_size=8), there)
    assert (given.model.size, given.model.decoder_embed_dim, given.model.patch_size) == ("small", None, 8)
    plain = as_in(Pretrain(), there | {"decoder": "plain"})
    assert (plain.model.decoder, plain.model.decoder_embed_dim) == ("plain", 8)
    assert as_in(Pretrain(), there | {"decoder": "plain"}, given=("decoder",)).model.decoder == "ushape"
    assert as_in(Pretrain(), there | {"name": "uvit"}) == Pretrain()  # refused with its weights


def test_encoders_of_timm_come_along_and_others_are_refused(run: Path, tmp_path: Path) -> None:
    pretrain(small(tmp_path / "run", encoder="timm:test_vit", embed_dim=None, depth=None, num_heads=None, steps=1))
    model = started(tmp_path / "run").config.model
    assert (model.encoder, model.patch_size) == ("timm:test_vit", 4)
    with pytest.raises(ValueError, match=r"img_size 16 there, 8 here\. Leave such settings out"):
        started(tmp_path / "run", img_size=8)
    with pytest.raises(ValueError, match=r"in_chans 3 there, 1 here.* take images of as many channels"):
        started(tmp_path / "run", data="digits", img_size=16)
    with pytest.raises(ValueError, match="different architecture: uvit, which is no encoder"):
        started(run)
