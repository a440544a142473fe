"""Fine-tuning: the recipe's parts, chance that depends on images alone, runs killed and resumed."""

import math
import shutil
import signal
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import timm
import torch
from drive import STEPS, differences, finetune, pretrain, small, small_classifier, start, together, train, train_rank
from timm.loss import SoftTargetCrossEntropy
from torch import Tensor, nn

import residua
from residua import data
from residua.adapt.encoder import create_model
from residua.data import Batch
from residua.nn import Classifier, ResNet
from residua.train import Finetune, Hooks, fit, read_metrics
from residua.train.checkpoint import checkpoints
from residua.train.classify import Classification, Labelling, prepare
from residua.train.optim import parameter_groups
from residua.train.session import share_batch_norm

Weights = dict[str, Tensor]
RESNET = {"width": 4, "stages": (1, 1, 2, 1), "optimizer": "sgd", "alpha_min": 0.7, "lr": 0.05}


def weights(model: nn.Module) -> Weights:
    return {k: v.detach().clone() for k, v in model.state_dict().items()}


def trained(model: str, **changes: Any) -> Weights:
    return weights(prepare(small_classifier(model, ema=None, **changes)).loop().fit())


def close(one: Weights, other: Weights) -> None:
    for name, value in one.items():
        torch.testing.assert_close(value, other[name], rtol=1e-3, atol=2e-5, msg=lambda m, n=name: f"{n}: {m}")


# ---------------------------------------------------------------- killed and resumed, shared


@pytest.mark.parametrize("stage", ["in the training state", "after the rename", "in a record"])
def test_killed_and_resumed_it_ends_the_same(encoder: str, tmp_path: Path, stage: str) -> None:
    calm, run = tmp_path / "calm", tmp_path / "run"
    finetune(small_classifier(encoder, calm))
    process = start(train, small_classifier(encoder, run), stage, 4 if "record" in stage else 2)
    process.join(120)
    assert process.exitcode == -signal.SIGKILL
    finetune(small_classifier(encoder, run, resume=True))
    assert differences(run, calm) == []


def test_a_resnet_with_sgd_resumes_exactly(tmp_path: Path) -> None:
    calm, run = tmp_path / "calm", tmp_path / "run"
    finetune(small_classifier("resnet18", calm, **RESNET))
    process = start(train, small_classifier("resnet18", run, **RESNET), "in the training state", 3)
    process.join(120)
    assert process.exitcode == -signal.SIGKILL
    finetune(small_classifier("resnet18", run, resume=True, **RESNET))
    assert differences(run, calm) == []


def test_an_annealed_one_goes_on(tmp_path: Path) -> None:
    calm, run = tmp_path / "calm", tmp_path / "run"
    annealed = RESNET | {"alpha_min": 0.7, "anneal": 1.0}
    finetune(small_classifier("resnet18", calm, **annealed))
    finetune(small_classifier("resnet18", run, **annealed))
    shutil.rmtree(checkpoints(run)[-1])
    finetune(small_classifier("resnet18", run, resume=True, **annealed))
    assert differences(run, calm) == []
    assert float(residua.load(run).shortcut.alpha[-1]) == pytest.approx(0.7)


def test_a_run_that_goes_on_needs_nothing_it_started_from(encoder: str, tmp_path: Path) -> None:
    run, gone = tmp_path / "run", tmp_path / "gone"
    Path(encoder).rename(gone)
    config = small_classifier(str(gone), run)

    def leave(record: dict[str, Any]) -> None:
        if record["step"] >= 6:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        finetune(config, Hooks(on_record=leave))
    gone.rename(encoder)
    finetune(Finetune().override(out=str(run), resume=True, cpu=True, trackers=()))
    assert [r["step"] for r in read_metrics(run)][-1] == STEPS
    with pytest.raises(ValueError, match=r"mixup is 0.8 there, 0.1 was given"):
        prepare(config.override(resume=True, mixup=0.1))


def test_two_processes_follow_one(encoder: str, tmp_path: Path) -> None:
    changes = {"log_every": 1, "steps": 6}
    finetune(small_classifier(encoder, tmp_path / "one", **changes))
    config = small_classifier(encoder, tmp_path / "two", **changes)
    assert together(train_rank, config) == [0, 0]
    one, two = read_metrics(tmp_path / "one"), read_metrics(tmp_path / "two")
    assert [r["loss"] for r in two] == pytest.approx([r["loss"] for r in one], rel=1e-5)
    assert [r["grad_norm"] for r in two] == pytest.approx([r["grad_norm"] for r in one], rel=1e-3)


def test_batch_norm_is_shared_on_gpus_or_refused(encoder: str) -> None:
    def accelerator(world: int, device: str) -> Any:
        return SimpleNamespace(num_processes=world, device=torch.device(device))

    model = residua.create_model("resnet18", num_classes=3, width=4)
    names, count = list(model.state_dict()), sum(isinstance(m, nn.BatchNorm2d) for m in model.modules())
    share_batch_norm(model, accelerator(1, "cpu"))
    with pytest.raises(ValueError, match="batch norm, which 2 processes can share on GPUs alone: use one process"):
        share_batch_norm(model, accelerator(2, "cpu"))
    assert sum(isinstance(m, nn.BatchNorm2d) for m in model.modules()) == count
    share_batch_norm(model, accelerator(2, "cuda"))
    assert sum(isinstance(m, nn.SyncBatchNorm) for m in model.modules()) == count
    assert list(model.state_dict()) == names
    share_batch_norm(residua.load(encoder), accelerator(2, "cpu"))  # which has none


def test_two_processes_are_refused_a_network_with_batch_norm_on_the_cpu(tmp_path: Path) -> None:
    config = small_classifier("resnet18", tmp_path / "run", **RESNET)
    assert 0 not in together(train_rank, config)
    assert not (tmp_path / "run").exists()


def test_recomputing_does_not_count_as_work(encoder: str) -> None:
    plain, again = (prepare(small_classifier(encoder, grad_checkpointing=on)) for on in (False, True))
    assert again.settings.flops_per_image == plain.settings.flops_per_image


@pytest.mark.parametrize("micro", [4, 5, 1])
def test_pairs_stay_together_when_the_batch_is_split(encoder: str, micro: int) -> None:
    session = prepare(small_classifier(encoder, ema=None, micro_batch=micro))
    loop = session.loop()
    assert loop.micro == {4: 4, 5: 6, 1: 2}[micro]
    close(weights(loop.fit()), trained(encoder))


def test_an_odd_batch_leaves_one_image_unmixed(encoder: str) -> None:
    session = prepare(small_classifier(encoder, batch_size=7))
    objective = session.objective()
    assert isinstance(objective, Labelling)
    batch = next(session.feed.iterate([torch.arange(7)]))
    _, targets = objective.view(batch, torch.zeros(7, dtype=torch.int64))
    assert float(targets[-1].max()) == pytest.approx(0.9 + 0.1 / targets.shape[1])


@pytest.mark.parametrize("change", [{"resident": False, "workers": 0}, {"grad_checkpointing": True}])
def test_machine_settings_change_no_bit(encoder: str, change: dict[str, Any]) -> None:
    one, other = trained(encoder), trained(encoder, **change)
    assert all(torch.equal(one[k], other[k]) for k in one)


# ---------------------------------------------------------------- chance and the objective


@pytest.fixture
def session(encoder: str) -> Classification:
    return prepare(small_classifier(encoder))


def test_chance_depends_on_seed_epoch_and_images_alone(session: Classification, encoder: str) -> None:
    objective = session.objective()
    assert isinstance(objective, Labelling)
    batch = next(session.feed.iterate([torch.arange(12)]))
    epochs = torch.tensor([0] * 6 + [1] * 6)
    images, targets = objective.view(batch, epochs)
    keep = objective.keep(batch, epochs)
    assert keep is not None
    torch.manual_seed(123)  # the global state has no part in it
    for i in (0, 4, 10):
        rows = slice(i, i + 2)
        pair = Batch(batch.pixels[rows], batch.sizes[rows], batch.index[rows])
        own, labels = objective.view(pair, epochs[rows])
        torch.testing.assert_close(own, images[rows], rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(labels, targets[rows])
        assert torch.equal(objective.keep(pair, epochs[rows]), keep[rows])
        later = objective.view(pair, epochs[rows] + 1)[0]
        assert not torch.allclose(later, own, atol=1e-2)
    other = prepare(small_classifier(encoder, seed=1)).objective()
    assert not torch.equal(other.view(batch, epochs)[1], targets)


def test_branches_are_dropped_at_timms_rates(session: Classification) -> None:
    objective = session.objective()
    assert isinstance(objective, Labelling)
    index = torch.arange(4000)
    keep = objective.keep(Batch(index, index, index), torch.zeros(4000, dtype=torch.int64))
    assert keep is not None
    theirs = timm.create_model("vit_tiny_patch16_224", depth=2, drop_path_rate=0.3)
    rates = [getattr(d, "drop_prob", 0.0) for b in theirs.blocks for d in (b.drop_path1, b.drop_path2)]
    for column, rate in zip(keep.T, rates):
        kept = column[column > 0]
        torch.testing.assert_close(kept, torch.full_like(kept, 1 / (1 - rate)))
        assert float((column == 0).float().mean()) == pytest.approx(rate, abs=0.03)


def test_the_loss_is_timms(session: Classification) -> None:
    objective = session.objective()
    assert isinstance(objective, Labelling)
    batch, epochs = next(session.feed.iterate([torch.arange(8)])), torch.zeros(8, dtype=torch.int64)
    images, targets = objective.view(batch, epochs)
    nn.init.normal_(session.model.head.weight)  # a head that starts near zero would hide what it is given
    logits = session.model(images, objective.keep(batch, epochs))
    expected = SoftTargetCrossEntropy()(logits, targets)
    torch.testing.assert_close(objective(session.model, batch, epochs), expected)


def test_without_regularisation_it_is_plain_cross_entropy(encoder: str) -> None:
    off = dict.fromkeys(("mixup", "cutmix", "erasing", "drop_path", "smoothing"), 0.0)
    session = prepare(small_classifier(encoder, **off))
    objective = session.objective()
    assert isinstance(objective, Labelling)
    assert objective.together == 1
    batch, epochs = next(session.feed.iterate([torch.arange(8)])), torch.zeros(8, dtype=torch.int64)
    nn.init.normal_(session.model.head.weight)
    pre = session.preprocessing
    views = data.train_view(batch, pre.img_size, pre.mean, pre.std, seed=0, epoch=0, scale=(0.5, 1.0))
    labels = torch.from_numpy(session.splits.train.labels[:8])
    torch.testing.assert_close(
        objective(session.model, batch, epochs), nn.functional.cross_entropy(session.model(views), labels)
    )
    images, _ = objective.view(batch, epochs)
    assert images.is_contiguous(memory_format=torch.channels_last)  # on a CPU: benchmarks/resnet_step.py


def regularised(encoder: str, **settings: float) -> tuple[Tensor, Tensor]:
    """Images and targets of six pairs that are of two classes each, with nothing on but what is given."""
    off = dict.fromkeys(("mixup", "cutmix", "erasing", "drop_path", "smoothing"), 0.0)
    session = prepare(small_classifier(encoder, **off | settings))
    objective, labels = session.objective(), session.splits.train.labels
    assert isinstance(objective, Labelling)
    unlike = [(i, i + 1) for i in range(0, 40, 2) if labels[i] != labels[i + 1]][:6]
    batch = next(session.feed.iterate([torch.tensor(unlike).flatten()]))
    return objective.view(batch, torch.zeros(12, dtype=torch.int64))


def swapped(x: Tensor) -> Tensor:
    """Each of a pair in the other's place."""
    return torch.stack([x[1::2], x[::2]], 1).flatten(0, 1)


def test_mixup_blends_and_cutmix_pastes_and_labels_follow(encoder: str) -> None:
    images, labels = regularised(encoder)
    assert set(labels.unique().tolist()) == {0.0, 1.0}
    for kind in ("mixup", "cutmix"):
        mixed, targets = regularised(encoder, **{kind: 0.8})
        own = (targets * labels).sum(1)
        assert float(own.min()) < 0.9
        torch.testing.assert_close(targets, own[:, None] * labels + (1 - own)[:, None] * swapped(labels))
        if kind == "mixup":
            share = own[:, None, None, None]
            torch.testing.assert_close(mixed, share * images + (1 - share) * swapped(images), rtol=1e-4, atol=1e-4)
            continue
        kept, pasted = ((mixed == whole).all(1) for whole in (images, swapped(images)))
        assert (kept | pasted).all()
        assert (kept.float().mean((1, 2)) >= own - 1e-5).all()  # more where the two are alike
        assert (pasted.float().mean((1, 2)) >= 1 - own - 1e-5).all()


def test_smoothing_spreads_its_share_over_all_classes(encoder: str) -> None:
    labels, targets = regularised(encoder)[1], regularised(encoder, smoothing=0.2)[1]
    torch.testing.assert_close(targets, 0.8 * labels + 0.2 / labels.shape[1])


def test_erasing_replaces_a_rectangle(encoder: str) -> None:
    images, labels = regularised(encoder)
    erased, targets = regularised(encoder, erasing=0.99)
    assert torch.equal(targets, labels)
    changed = (erased != images).any(1)
    assert changed.flatten(1).any(1).sum() > 8
    for one in changed:
        assert torch.equal(one, one.any(1)[:, None] & one.any(0))


def test_a_step_is_one_graph(session: Classification) -> None:
    """Nothing in the objective needs the host, once views are cut: it can be compiled whole, and recorded."""
    objective = session.objective()
    batch, epochs = next(session.feed.iterate([torch.arange(8)])), torch.zeros(8, dtype=torch.int64)

    def loss(pixels: Tensor, sizes: Tensor, index: Tensor) -> Tensor:
        return objective(session.model, Batch(pixels[:, :, :16, :16], sizes, index, cut=True), epochs)

    nn.init.normal_(session.model.head.weight)
    whole = torch.compile(loss, backend="eager", fullgraph=True)
    expected = loss(batch.pixels, batch.sizes, batch.index)
    torch.testing.assert_close(whole(batch.pixels, batch.sizes, batch.index), expected)


# ---------------------------------------------------------------- the optimiser


def test_layer_decay_is_timms() -> None:
    shape = {"img_size": 16, "patch_size": 4, "embed_dim": 32, "depth": 3, "num_heads": 2}
    theirs = timm.models.VisionTransformer(
        **shape, num_classes=5, global_pool="avg", fc_norm=True, norm_layer=partial(nn.LayerNorm, eps=1e-6)
    )
    ours = residua.create_model("vit", **shape, num_classes=5)
    excluded = theirs.no_weight_decay()
    expected = by_name(
        theirs,
        timm.optim.param_groups_layer_decay(theirs, 0.05, no_weight_decay_list=excluded, layer_decay=0.65),
    )
    session = object.__new__(Classification)
    session.model, session.config = ours, Finetune().override(layer_decay=0.65, weight_decay=0.05)
    groups = session.groups()
    assert groups is not None
    renamed = {}
    for name, value in by_name(ours, groups).items():
        renamed[f"fc_{name}" if name.startswith("norm.") else name.removeprefix("encoder.")] = value
    assert renamed == {name: v for name, v in expected.items() if name != "pos_embed"}
    assert renamed["blocks.0.mlp.fc1.weight"] == (pytest.approx(0.65**3), 0.05)
    assert renamed["head.weight"] == (1.0, 0.05)
    assert renamed["cls_token"] == (pytest.approx(0.65**4), 0.0)


@pytest.mark.parametrize("name", ["deit_tiny_distilled_patch16_224", "vit_little_patch16_reg4_gap_256"])
def test_tokens_and_positions_of_a_timm_encoder_are_not_decayed(name: str) -> None:
    model: Any = create_model("timm_vit", encoder=f"timm:{name}", img_size=32, num_classes=3)
    session = object.__new__(Classification)
    session.model, session.config = model, Finetune().override(layer_decay=0.65, weight_decay=0.05)
    groups = session.groups()
    assert groups is not None
    decayed = {n for n, (_, decay) in by_name(model, groups).items() if decay}
    assert {"encoder.blocks.0.mlp.fc1.weight", "encoder.patch_embed.proj.weight", "head.weight"} <= decayed
    assert not {"encoder.pos_embed", *(f"encoder.{token}" for token in model.encoder.tokens)} & decayed
    plain = {id(p) for p in parameter_groups(model, 0.05)[0]["params"]}
    assert decayed == {n for n, p in model.named_parameters() if id(p) in plain}, "the same with layer decay as without"


def by_name(model: nn.Module, groups: list[dict[str, Any]]) -> dict[str, tuple[float, float]]:
    names = {id(p): name for name, p in model.named_parameters()}
    return {names[id(p)]: (g["lr_scale"], g["weight_decay"]) for g in groups for p in g["params"]}


def test_the_loop_follows_the_layers(session: Classification) -> None:
    loop = session.loop()
    for images in loop.batches(0, 1):
        loop.advance(images)
    rates = {group["lr_scale"]: group["lr"] for group in loop.optimizer.param_groups}
    assert len(rates) == 4  # embedding, two blocks, head
    for scale, rate in rates.items():
        assert rate == pytest.approx(2e-3 * scale)


def test_sgd_is_torchs_with_nesterov_momentum() -> None:
    session = prepare(small_classifier("resnet18", **RESNET, ema=None, clip=None, steps=3))
    twin = residua.create_model(**session.model.config)
    twin.load_state_dict(session.model.state_dict())
    loop = session.loop()
    matrices = [p for p in twin.parameters() if p.ndim >= 2]
    others = [p for p in twin.parameters() if p.ndim < 2]
    groups = [{"params": matrices, "weight_decay": 5e-4}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.SGD(groups, lr=0.1, momentum=0.9, nesterov=True)
    for step, chosen in enumerate(loop.batches(0, 3)):
        expected = loop.objective(twin.train(), session.feed.gather(*chosen), loop.order.epoch_of(step))
        optimizer.zero_grad()
        expected.backward()
        loop.model.train()
        assert float(loop.advance(chosen)[0]) == pytest.approx(expected.item(), rel=1e-5)
        for group, own in zip(optimizer.param_groups, loop.optimizer.param_groups):
            group["lr"] = own["lr"]
        optimizer.step()
    close(weights(session.model), weights(twin))


# ---------------------------------------------------------------- what is trained


def test_the_encoder_starts_as_it_was_pretrained(session: Classification, encoder: str) -> None:
    mae: Any = residua.load(encoder)
    model = session.model
    assert isinstance(model, Classifier)
    assert model.readout == "patches"
    for name, value in mae.encoder.state_dict().items():
        assert torch.equal(model.encoder.state_dict()[name], value), name
    assert session.preprocessing == mae.preprocessing
    assert "read-out: mean of patches" in dict(session.lines())["model"]
    assert "alpha_min 0.7" in dict(session.lines())["model"]


def test_positions_are_interpolated_for_another_size(encoder: str) -> None:
    mae: Any = residua.load(encoder)
    model = prepare(small_classifier(encoder, img_size=24)).model
    assert model.encoder.grid == (6, 6)
    images = torch.randn(2, 3, 24, 24)
    torch.testing.assert_close(model.encoder(images), mae.encoder(images))
    assert not torch.allclose(model.encoder.pos_embed, residua.create_model(**model.config).encoder.pos_embed)


def test_the_class_token_keeps_its_norm(tmp_path: Path) -> None:
    run = tmp_path / "plain"
    pretrain(small(run, steps=3, decoder="plain", anneal=0.0))
    mae: Any = residua.load(run)
    nn.init.normal_(mae.encoder.norm.weight)
    images = torch.randn(2, 3, 16, 16)
    model = prepare(small_classifier(str(run), readout="cls"), start=mae).model
    torch.testing.assert_close(model.pooled(images), mae.encoder(images)[:, 0])
    fresh = prepare(small_classifier(str(run), readout="patches"), start=mae).model
    assert torch.equal(fresh.norm.weight, torch.ones(32))


def test_a_classifier_is_loaded_whole(encoder: str, tmp_path: Path) -> None:
    run = tmp_path / "run"
    model = finetune(small_classifier(encoder, run))
    loaded: Any = residua.load(run)
    images = torch.randn(2, 3, 16, 16)
    assert torch.equal(loaded(images), model(images))
    assert loaded.classes == data.load("shapes").train.classes
    assert loaded.preprocessing == model.preprocessing == loaded.encoder.preprocessing
    again = prepare(small_classifier(str(run), readout="cls"))  # its encoder with another head
    assert torch.equal(again.model.encoder.cls_token, loaded.encoder.cls_token)
    assert float(again.model.head.weight.detach().abs().max()) < 1e-3
    settings = Finetune.read(run / "config.yaml")
    assert (settings.shortcut.alpha_min, settings.network.patch_size) == (0.7, 4)
    pretrained = small(init=str(run))
    assert torch.equal(residua.train.prepare(pretrained).model.encoder.cls_token, loaded.encoder.cls_token)


def test_a_resnet_is_trained_from_scratch_and_further(tmp_path: Path) -> None:
    run = tmp_path / "run"
    session = prepare(small_classifier("resnet18", run, **RESNET))
    model = fit(session)
    assert isinstance(model, ResNet)
    assert int(model.bn1.num_batches_tracked) == STEPS  # the count of one step each, none for the estimate
    loaded: Any = residua.load(run)
    images = torch.randn(2, 3, 16, 16)
    assert torch.equal(loaded(images), model(images))
    further = prepare(small_classifier(str(run))).model
    assert torch.equal(further.layer1[0].conv1.weight, loaded.layer1[0].conv1.weight)
    assert not torch.equal(further.fc.weight, loaded.fc.weight)
    assert "resnet18 from scratch, alpha_min 0.7" in dict(session.lines())["model"]


def test_a_run_that_blows_up_says_what_to_try(encoder: str) -> None:
    loop = prepare(small_classifier(encoder)).loop()
    objective = loop.objective
    loop.objective = lambda model, batch, epochs: objective(model, batch, epochs) * math.nan
    with pytest.raises(
        residua.train.TrainingStopped,
        match=r"Try a smaller --lr, --clip 1\.0 or, .* a larger --alpha-min\.$",
    ):
        loop.fit()


def test_images_of_a_run_are_treated_as_they_were_there(tmp_path: Path) -> None:
    pretrain(small(tmp_path / "run", steps=1, on_bad_image="skip"))
    config = small_classifier(str(tmp_path / "run"), data="auto")
    assert prepare(config, write=False).config.machine.on_bad_image == "skip"
    assert prepare(config, write=False, given=("on_bad_image",)).config.machine.on_bad_image == "error"
