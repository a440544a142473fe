import math
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image
from timm.optim import Lars

from residua.data import Batch, Splits, load, train_view
from residua.data.errors import DataWarning
from residua.evaluate import CollapsedError, mae_probe, online
from residua.evaluate.features import Subject, encoder_subject, pixel_subject, preprocessing_of
from residua.evaluate.online import LarsHeads, probe_online
from residua.evaluate.protocols import ProbeResult, Recipe, resolve_recipe, split
from residua.evaluate.reading import View, open_feed
from residua.evaluate.suite import evaluate
from residua.nn import ViT

EPOCHS, BATCH, SEED = 3, 20, 4


def as_batch(source, numbers: torch.Tensor) -> Batch:
    images = torch.stack([torch.from_numpy(source.read(i)) for i in numbers.tolist()]).permute(0, 3, 1, 2)
    return Batch(images, torch.tensor([images.shape[2:]] * len(numbers)), numbers)


def plain_probe(vit: ViT, data: Splits, lr: float) -> torch.nn.Module:
    """He et al.'s probe with PyTorch's BatchNorm1d and timm's Lars, one head, the class token."""
    vit.eval()
    mean, std = data.train.stats()
    labels = torch.from_numpy(data.train.labels)
    bn, linear = torch.nn.BatchNorm1d(32, affine=False, eps=1e-6), torch.nn.Linear(32, 3)
    start = torch.empty(32, 3)
    torch.nn.init.trunc_normal_(start, std=0.01, generator=torch.Generator().manual_seed(SEED))
    linear.weight.data, linear.bias.data = start.T.contiguous(), torch.zeros(3)
    groups = [{"params": [linear.weight], "always_adapt": True}, {"params": [linear.bias], "always_adapt": False}]
    optimizer = Lars(groups, lr=1.0, momentum=0.9, weight_decay=0.0, trust_coeff=0.001)
    head, generator = torch.nn.Sequential(bn, linear), torch.Generator().manual_seed(SEED)
    steps = math.ceil(50 / BATCH)
    for epoch in range(EPOCHS):
        order = torch.randperm(50, generator=generator)
        for i, batch in enumerate(order.tensor_split(steps)):
            images = train_view(as_batch(data.train, batch), 16, mean, std, seed=SEED, epoch=epoch, scale=(0.08, 1.0))
            with torch.no_grad():
                x = vit.forward_features(images)[:, 0]
            step, total = epoch * steps + i, EPOCHS * steps
            ramp = total / 9
            share = (step - ramp) / (total - ramp)
            factor = (step + 1) / ramp if step < ramp else (1 + math.cos(math.pi * share)) / 2
            for group in optimizer.param_groups:
                group["lr"] = lr * BATCH / 256 * factor
            optimizer.zero_grad()
            F.cross_entropy(head(x), labels[batch]).backward()
            optimizer.step()
    return head.eval()


def test_it_is_he_et_als_protocol(vit: ViT, noise: Splits, monkeypatch) -> None:
    made: list[LarsHeads] = []
    start = LarsHeads.__init__

    def keep(self, *args, **options) -> None:
        start(self, *args, **options)
        made.append(self)

    monkeypatch.setattr(LarsHeads, "__init__", keep)
    rates = (0.1, 30.0)
    options = {"readout": ("cls", "tokens"), "epochs": EPOCHS, "batch_size": BATCH, "seed": SEED}
    result = mae_probe(vit, noise, learning_rates=rates, encoder_batch=7, **options)
    everyone, some = made
    x = torch.randn(11, 32)
    for r, lr in enumerate(rates):
        expected = plain_probe(vit, noise, lr)(x)
        torch.testing.assert_close(everyone.logits(0, x)[:, r], expected.detach(), atol=1e-4, rtol=1e-3)
    assert not torch.allclose(some.logits(0, x), everyone.logits(0, x), atol=1e-3)  # which saw fewer images
    assert (result.protocol, result.epochs, result.batch_size, result.n_train) == ("mae", EPOCHS, BATCH, 50)
    assert {(h.readout, h.learning_rate) for h in result.grid} == {(r, lr) for r in ("cls", "tokens") for lr in rates}
    assert result == mae_probe(vit, noise, learning_rates=rates, encoder_batch=7, **options)


def test_held_out_images_are_the_seeds_share_of_those_trained_on(vit: ViT, noise: Splits, monkeypatch) -> None:
    """They judge heads that have not seen them; the test images judge those that have seen all."""
    scored: list[tuple[int, list[int]]] = []
    seen: dict[int, int] = {}
    score, step = online._score, LarsHeads.step

    def count(self, features, y, factor):
        seen[id(self)] = seen.get(id(self), 0) + len(y)
        step(self, features, y, factor)

    def keep(heads, feed, labels, reader, keys, rows, view):
        scored.append((seen[id(heads)], rows.tolist()))
        return score(heads, feed, labels, reader, keys, rows, view)

    monkeypatch.setattr(LarsHeads, "step", count)
    monkeypatch.setattr(online, "_score", keep)
    rows = [torch.arange(1, 50, 2), torch.arange(0, 21, 3)]
    probed({"": encoder_subject(vit, [2], ("cls",))}, vit, noise, rows)
    kept, held = split(torch.from_numpy(noise.train.labels)[rows[0]], 0.3, SEED)
    assert scored == [(len(kept), rows[0][held].tolist()), (25, rows[1].tolist())]


def probed(subjects: dict[str, Subject], vit: ViT, data: Splits, rows: list[torch.Tensor]) -> dict[str, ProbeResult]:
    view = View(preprocessing_of(vit, data.train), seed=SEED)
    feeds = [open_feed(part, torch.device("cpu"), view) for part in (data.train, data.test)]
    recipe = resolve_recipe("mae", len(rows[0]), learning_rates=(0.1, 10.0), epochs=1)
    return probe_online(subjects, feeds, rows, view, recipe, holdout=0.3)


def test_subjects_together_score_as_each_alone(vit: ViT, noise: Splits) -> None:
    subjects = {"model": encoder_subject(vit, [0, 2], ("cls",)), "pixels": pixel_subject(8)}
    rows = [torch.arange(50), torch.arange(21)]
    together = probed(subjects, vit, noise, rows)
    for name, subject in subjects.items():
        alone = probed({name: subject}, vit, noise, rows)[name]
        assert together[name].accuracy == alone.accuracy
        assert [(h.layer, h.readout) for h in together[name].grid] == [(h.layer, h.readout) for h in alone.grid]
        losses = [[h.held_out_loss for h in result.grid] for result in (together[name], alone)]
        assert losses[0] == pytest.approx(losses[1], rel=1e-4)


def test_only_readable_images_count(vit: ViT, tmp_path) -> None:
    rng = np.random.default_rng(0)
    for i in range(24):
        file = tmp_path / ("test" if i < 8 else "train") / "ab"[i % 2] / f"{i}.png"
        file.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(rng.integers(0, 256, (16, 16, 3), dtype=np.uint8)).save(file)
        if i in (2, 5, 6):
            file.write_bytes(file.read_bytes()[:200])
    options = {"epochs": 1, "learning_rates": (1.0,), "on_bad_image": "skip"}
    with pytest.warns(DataWarning, match="3 of 8 test images"):
        result = mae_probe(vit, load(f"folder:{tmp_path}"), **options)
    assert result.n_test == 5
    assert result.accuracy / 100 * 5 == pytest.approx(round(result.accuracy / 100 * 5))


def test_half_precision_of_the_encoder_is_close_and_used(vit: ViT, noise: Splits) -> None:
    view, subject = View(preprocessing_of(vit, noise.train)), encoder_subject(vit, [2], ("cls",))
    batch = open_feed(noise.train, torch.device("cpu"), view).gather(torch.arange(9))
    full, half = (online._features(batch, subject.reader(subject.columns), replace(view, bf16=b), 0)[0]["cls", 2]
                  for b in (False, True))  # fmt: skip
    assert half.dtype == torch.float32
    assert not torch.equal(full, half)
    torch.testing.assert_close(full, half, atol=0.1, rtol=0.1)


def test_a_limit_is_kept_to(vit: ViT, noise: Splits) -> None:
    result = mae_probe(vit, noise, limit=20, epochs=1, learning_rates=(1.0,))
    assert (result.n_train, result.n_test) == (20, 20)


def test_weight_decay_and_trust_are_timms_for_every_head() -> None:
    settings = [(0.5, 0.0), (2.0, 0.1), (0.5, 20.0)]
    heads = LarsHeads(settings, classes=4, recipe=Recipe(1, 256, 0.0, (), ()), seed=1)
    features, y = torch.randn(5, 30, 6) * 3 + 1, torch.randint(4, (5, 30))
    for x, labels in zip(features, y):
        heads.step([x], labels, 1.0)
    probe = torch.randn(8, 6)
    for r, (lr, wd) in enumerate(settings):
        bn, linear = torch.nn.BatchNorm1d(6, affine=False, eps=1e-6), torch.nn.Linear(6, 4)
        start = torch.empty(6, 4)
        torch.nn.init.trunc_normal_(start, std=0.01, generator=torch.Generator().manual_seed(1))
        linear.weight.data, linear.bias.data = start.T.contiguous(), torch.zeros(4)
        groups = [{"params": [linear.weight], "weight_decay": wd, "always_adapt": True}, {"params": [linear.bias]}]
        optimizer = Lars(groups, lr=lr, momentum=0.9)
        for x, labels in zip(features, y):
            optimizer.zero_grad()
            F.cross_entropy(linear(bn(x)), labels).backward()
            optimizer.step()
        torch.testing.assert_close(heads.logits(0, probe)[:, r], linear(bn.eval()(probe)).detach())


def test_it_learns_and_a_larger_rate_helps_a_small_set(digits: Splits) -> None:
    torch.manual_seed(0)
    vit = ViT(img_size=8, patch_size=2, in_chans=1, embed_dim=32, depth=2, num_heads=2)
    seen: list[tuple[str, int, int]] = []
    result = mae_probe(vit, digits, epochs=6, learning_rates=(0.1, 300.0), progress=lambda *a: seen.append(a))
    assert result.best.learning_rate == 300
    assert result.accuracy > 25
    assert result.accuracy < result.top5
    assert result.interval[0] < result.accuracy < result.interval[1]
    assert [told for told in seen if told[0] == "probing"] == [("probing", i + 1, 6) for i in range(6)]


def test_the_suite_probes_model_and_baselines_by_the_same_passes(vit: ViT, noise: Splits) -> None:
    options = {"probe": "mae", "epochs": 2, "rank": False, "knn": False, "neighbors": 0, "seed": SEED}
    report = evaluate(vit, noise, readout=("cls", "tokens"), **options)
    assert (
        report.value("linear probe") == mae_probe(vit, noise, readout=("cls", "tokens"), epochs=2, seed=SEED).accuracy
    )
    assert {s.subject for s in report.scores} == {"model", "random init", "pixels"}
    assert report.probes["pixels"]["protocol"] == "mae"
    untested = evaluate(vit, Splits("noise", noise.train), baselines=False, **options)
    assert (untested.n_train, untested.n_test) == (40, 10)
    assert untested.probes["model"]["n_train"] == 40


def test_what_cannot_be_probed_is_refused(vit: ViT, noise: Splits) -> None:
    with pytest.raises(ValueError, match="labelled training and test"):
        mae_probe(vit, Splits("noise", noise.train))
    with pytest.raises(ValueError, match="holdout"):
        mae_probe(vit, noise, holdout=0.0, epochs=1)
    with pytest.raises(ValueError, match="positive"):
        mae_probe(vit, noise, epochs=0)
    labels, noise.train.labels = noise.train.labels, np.zeros(50, np.int64)
    with pytest.raises(ValueError, match="two classes"):
        mae_probe(vit, noise, epochs=1)
    noise.train.labels = labels
    with torch.no_grad():
        for p in vit.parameters():
            p.zero_()
    with pytest.raises(CollapsedError, match="the same"):
        mae_probe(vit, noise, epochs=1)
    with torch.no_grad():
        vit.cls_token.fill_(math.nan)
    with pytest.raises(ValueError, match="NaN"):
        mae_probe(vit, noise, epochs=1)


def test_classes_are_those_that_occur_whatever_their_labels(vit: ViT, noise: Splits) -> None:
    found = []
    for factor in (1, 40):
        for part in (noise.train, noise.test):
            part.labels = part.labels * factor
        found.append(mae_probe(vit, noise, learning_rates=(10.0,), epochs=2))
    assert found[0].accuracy == found[1].accuracy
    assert math.isnan(found[1].top5)
