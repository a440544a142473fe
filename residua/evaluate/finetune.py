"""Fine-tuning: what an encoder is worth when all of it may still learn. A ResNet from scratch goes the same way."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from contextlib import closing
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from residua.data import Feed, Splits, load
from residua.disk import write_text
from residua.train.classify import Classification, check_labels, prepare
from residua.train.finetune_config import Finetune
from residua.train.loop import Hooks
from residua.train.processes import agreed
from residua.train.session import fit

from .features import TEST_SHARE, with_test
from .interval import wilson
from .rank import CollapsedError, entropy_rank
from .reading import View, collect_all, frozen, open_feed
from .report import finite


@dataclass(frozen=True)
class FinetuneResult:
    """Test accuracy in percent, with what it depends on."""

    accuracy: float
    top5: float
    """NaN where there are no more than five classes."""
    interval: tuple[float, float]
    """95 % interval of `accuracy` over test images (Wilson)."""
    n_test: int
    n_train: int
    test: str
    """Where the test images come from."""
    readout: str | None
    """What the head sees; None for a ResNet."""
    entropy_rank: float
    """Of the features that the head sees, on the test images, in nats."""
    cross_entropy: float
    """On the test images."""
    epochs: float
    seed: int
    run: str | None = None
    model: Any = field(default=None, repr=False, compare=False)

    def __float__(self) -> float:
        return self.accuracy

    def to_dict(self) -> dict[str, Any]:
        """Plain values, without the model."""
        return {f.name: getattr(self, f.name) for f in fields(self) if f.name != "model"}

    def __str__(self) -> str:
        low, high = self.interval
        five = "" if math.isnan(self.top5) else f", top-5 {self.top5:.1f} %"
        return (
            f"top-1 {self.accuracy:.1f} % (95 %: {low:.1f} to {high:.1f}){five} "
            f"of {self.n_test:,} images ({self.test}); entropy rank {self.entropy_rank:.2f} nats"
        )


@dataclass(frozen=True)
class Score:
    """A classifier on labelled images, in percent."""

    accuracy: float
    top5: float
    cross_entropy: float
    entropy_rank: float
    n: int


def finetune(
    model: nn.Module | str | Path,
    data: str | Splits | None = None,
    *,
    on_record: Callable[[dict[str, Any]], None] = lambda record: None,
    on_message: Callable[[str], None] = lambda text: None,
    **settings: Any,
) -> FinetuneResult:
    """Train an encoder and a new head end to end on labelled images, and test it.

    `model` is a network (it is left as it is), a run, a checkpoint, or the name of a network to train from scratch
    ("resnet18"). `data` defaults to what a run was trained on. `settings` are those of `residua finetune --help` by
    their plain names, by default MAE's recipe (He et al. 2022). With `out`, a folder, the run is kept there; otherwise
    the result's `model` is all there is. Where labelled data has no test split, a fifth of the training images
    (stratified, always the same, also in `evaluate`) is held out from training.

    >>> result = finetune("runs/a", "cifar100", epochs=20, mixup=0.0)
    >>> result.accuracy, result.interval, result.model.classes
    """
    config = Finetune().override(**settings)
    start = model if isinstance(model, nn.Module) else None
    if start is None:
        config = config.override(model=str(model))
    if isinstance(data, Splits):
        config = config.override(data=data.name)
    elif data is not None:
        config = config.override(data=data)
    write = config.machine.out is not None
    if not write:
        config = config.override(trackers=())
    given = data if isinstance(data, Splits) else None
    session = prepare(config, start=start, load=lambda spec: labelled(given or load(spec)), write=write, given=settings)
    return train_and_test(session, Hooks(on_record=on_record, on_message=on_message))


def labelled(splits: Splits) -> Splits:
    """Splits with labelled test images: their own, or a fifth of the training images."""
    check_labels(splits)
    return with_test(splits)[0]


def origin(splits: Splits) -> str:
    """Where the test images of `labelled` splits come from."""
    assert splits.test is not None
    held_out = splits.test.split == splits.train.split
    return f"{TEST_SHARE:.0%} of the training images, held out" if held_out else "test split"


def train_and_test(session: Classification, hooks: Hooks | None = None) -> FinetuneResult:
    """Train what is ready, testing every `eval_every` epochs and at the end."""
    hooks, every = hooks or Hooks(), session.config.machine.eval_every
    with closing(session):
        with agreed():
            tester = Tester(session)
        with closing(tester):
            if every:
                hooks.every = max(1, round(every * session.steps_per_epoch))
                hooks.on_interval = tester.record
            model = fit(session, hooks)
            score = tester(model)
    c = session.config
    result = FinetuneResult(
        accuracy=score.accuracy, top5=score.top5, interval=wilson(score.accuracy, score.n), n_test=score.n,
        n_train=len(session.feed), test=origin(session.splits), readout=getattr(model, "readout", None),
        entropy_rank=score.entropy_rank, cross_entropy=score.cross_entropy, epochs=float(c.optim.epochs),
        seed=c.optim.seed, run=None if session.run is None else str(session.run), model=model,
    )  # fmt: skip
    if session.run is not None and session.accelerator.is_main_process:
        write_text(session.run / "finetune.json", json.dumps(finite(result.to_dict()), indent=1))
    return result


class Tester:
    """Scores a classifier on the test images, which stay open between calls; several processes share the work."""

    def __init__(self, session: Classification) -> None:
        test = session.splits.test
        if test is None or test.labels is None:
            raise ValueError(f"{session.splits.name} has no labelled test images")
        self.view = View(session.preprocessing, bf16=session.settings.precision == "bf16")
        machine = session.config.machine
        self.feed: Feed = open_feed(test, session.accelerator.device, self.view, machine.on_bad_image, again=True)

    def __call__(self, model: nn.Module) -> Score:
        network: Any = model

        def reader(images: Tensor) -> dict[str, Tensor]:
            features = network.pooled(images)
            return {"features": features, "logits": network.head(features)}

        with frozen(model):
            index, read = collect_all(self.feed, reader, self.view)
        labels = torch.from_numpy(self.feed.source.labels)[index]
        return score(read["logits"][0], read["features"][0], labels)

    def record(self, step: int, model: nn.Module) -> dict[str, float]:
        """What a record of the training says about it."""
        found = asdict(self(model))
        return {f"eval/{name}": value for name, value in found.items() if name != "n" and not math.isnan(value)}

    def close(self) -> None:
        self.feed.close()


def score(logits: Tensor, features: Tensor, labels: Tensor) -> Score:
    """From logits (N, classes), features (N, D) and labels (N,)."""
    classes = logits.shape[1]
    best = logits.topk(min(5, classes)).indices == labels[:, None]
    top5 = 100 * float(best.any(1).double().mean()) if classes > 5 else math.nan
    loss = float(torch.nn.functional.cross_entropy(logits, labels))
    try:
        rank = entropy_rank(features)
    except CollapsedError:
        rank = 0.0
    return Score(100 * float(best[:, 0].double().mean()), top5, loss, rank, len(labels))
