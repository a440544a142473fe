"""A trained network looked at from all sides: the laws of its blocks, the paths of inputs, the collapse of classes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import torch
from torch import Tensor, nn

from residua.adapt import Foreign, is_own, stream, unwrapped
from residua.adapt.example import NoExample
from residua.adapt.foreign import preprocessing_of
from residua.data import DataError, Preprocessing, Source, Splits
from residua.data.errors import some
from residua.evaluate.reading import frozen
from residua.nn import SiT, UViT
from residua.nn.diffusion import noised
from residua.train.checkpoint import checkpoints, load

from .alignment import Alignment, Gauge, measure, stream_points
from .collapse import Collapse, neural_collapse
from .jacobian import Method, jacobian_svd
from .network import Bound, Precision, bind, trained_classes, twin_of

Split = Literal["train", "test", "both"]
Progress = Callable[[int, int], None]

MOST_CLASSES = 10  # whose paths are drawn
COLLAPSE_IMAGES = 2000  # of a split, for neural collapse and accuracy
_BATCH = 256


@dataclass(frozen=True)
class Look:
    """How a network is looked at."""

    k: int = 30
    """Singular triplets of every block."""
    images: int = 8
    """Images whose Jacobians are taken."""
    gauge: Gauge = "J"
    token: int | None = None
    """Of transformers: the Jacobian of this token alone, instead of all tokens together."""
    time: float = 0.1
    """Of diffusion models: the noise level in (0, 1) of what they are shown."""
    per_class: int = 10
    """Images of a class whose paths are drawn."""
    precision: Precision = "float64"
    method: Method = "auto"
    budget: float = 2.0
    """GiB for one chunk of products."""
    classes: int | None = None
    """C of RA3; default: the number of classes that a classifier of ours was trained on."""
    seed: int = 0
    """Chooses the images and the plane that paths are drawn in."""

    def __post_init__(self) -> None:
        if self.k < 1 or self.images < 1 or self.budget <= 0:
            raise ValueError(
                f"{self.k} triplets of {self.images} images with a budget of {self.budget:g} GiB: all must be positive"
            )
        if not 0 < self.time < 1:
            raise ValueError(f"time is {self.time:g}; choose a noise level in (0, 1)")
        if self.seed < 0:
            raise ValueError(f"seed is {self.seed}; choose 0 or more")


@dataclass(frozen=True)
class Part:
    """What was seen on one split."""

    split: str
    laws: Alignment
    paths: Tensor
    """(L + 1, N, 2): streams of some images before, between and after the blocks, in one random plane."""
    labels: Tensor | None
    """(N,): their classes."""
    collapse: dict[str, Collapse]
    """Layer -> neural collapse there; empty without labels."""
    accuracy: float | None
    """Of a classifier on up to 2,000 images, in percent."""
    others: dict[str, Tensor]
    """Block of another shape -> its top singular values (K,), mean over samples."""

    def to_dict(self) -> dict[str, Any]:
        layers = {name: found.to_dict() for name, found in self.collapse.items()}
        others = {name: values.tolist() for name, values in self.others.items()}
        laws = self.laws.to_dict()
        return {"split": self.split, "accuracy": self.accuracy, "laws": laws, "others": others, "collapse": layers}


@dataclass(frozen=True)
class Anatomy:
    """A network on its training and test images."""

    parts: list[Part]
    classes: list[str] | None
    """Names of the classes of the images."""
    look: Look

    @property
    def left_out(self) -> list[str]:
        """Blocks of another shape than those compared; their singular values are in the parts."""
        return list(self.parts[0].others)

    def to_dict(self) -> dict[str, Any]:
        settings = {name: getattr(self.look, name) for name in ("gauge", "token", "time", "precision", "seed")}
        return settings | {"left_out": self.left_out, "parts": [part.to_dict() for part in self.parts]}


def study(
    model: nn.Module,
    splits: Splits,
    split: Split = "both",
    look: Look | None = None,
    *,
    device: str | torch.device = "cpu",
    progress: Progress | None = None,
) -> Anatomy:
    """Residual Alignment and Neural Collapse of a trained network, on images of its training and test split.

    Works for every network with a residual stream (an autoencoder's is its encoder's), ours or foreign. C of RA3 is the
    number of classes that a classifier was trained on.

    >>> found = study(residua.load("runs/a"), residua.data.load("digits"))
    >>> found.parts[0].laws.verdicts()
    """
    look, model = look or Look(), unwrapped(model)
    check(model, splits)
    sources = {name: source for name, source in sources_of(splits, split).items() if source is not None and len(source)}
    where = torch.device(device)
    parts = [_part(model, name, source, splits, look, where, progress) for name, source in sources.items()]
    return Anatomy(parts, splits.train.classes, look)


def check(model: nn.Module, splits: Splits) -> None:
    """Refuse what cannot be measured, before anything is."""
    if getattr(model, "autoencoder", None) is not None:
        raise ValueError("a model of latents is not shown images: call residua.anatomy.alignment(model, x_t, t)")
    try:
        steps = stream(model)
    except NoExample as error:
        raise ValueError(
            f"{type(model).__name__} does not say which input it takes; in Python, with all that it is called with: "
            "residua.anatomy.alignment(model, images, ...)"
        ) from error
    except (TypeError, ValueError) as error:
        raise ValueError(f"its residual blocks cannot be told: {error}") from error
    if len(steps) < 2:
        raise ValueError(f"{type(model).__name__} has {len(steps)} residual step: alignment compares at least two")
    body: Any = getattr(model, "encoder", model)
    takes = body.in_chans if is_own(model) else preprocessing_of(model).in_chans
    if splits.train.channels not in ((takes,) if is_own(model) else (1, takes)):
        raise DataError(f"{splits.train.name} has {splits.train.channels} channels, the network takes {takes}")


def sources_of(splits: Splits, split: Split) -> dict[str, Source | None]:
    """The images of the splits asked for; an error where one that was asked for by name is not there."""
    if split not in get_args(Split):
        raise ValueError(f"split is {split!r}; choose one of {', '.join(get_args(Split))}")
    found = {"train": splits.train, "test": splits.test}
    if split == "both":
        return found
    if found[split] is None:
        raise DataError(f"{splits.name} has no {split} split")
    return {split: found[split]}


def _part(
    model: nn.Module,
    name: str,
    source: Source,
    splits: Splits,
    look: Look,
    device: torch.device,
    progress: Progress | None,
) -> Part:
    pre = preprocessing(model, splits.train)
    twin = twin_of(model, look.precision, device)
    laws, others = _laws(model, twin, source, pre, look, progress)
    drawn = _drawn(source, look)
    path = _bound(twin, source, drawn, pre, look)
    collapse, accuracy = layers(model, source, pre, device, look.seed, look.time)
    labels = None if source.labels is None else torch.from_numpy(source.labels[drawn])
    return Part(name, laws, _plane(path, look), labels, collapse, accuracy, others)


def _laws(
    model: nn.Module, twin: nn.Module, source: Source, pre: Preprocessing, look: Look, progress: Progress | None = None
) -> tuple[Alignment, dict[str, Tensor]]:
    bound = _bound(twin, source, balanced(source, look.images, look.seed), pre, look)
    classes = trained_classes(model) if look.classes is None else look.classes
    laws = measure(
        bound.blocks, bound.end, min(look.k, bound.blocks[0].x[0].numel()), gauge=look.gauge, method=look.method,
        classes=classes, budget=look.budget, seed=look.seed, progress=progress,
    )  # fmt: skip
    others = {}
    for block in bound.others:
        with torch.no_grad():
            k = min(look.k, block.x[0].numel(), block.branch(block.x)[0].numel())
        svd = jacobian_svd(block.branch, block.x, k, method=look.method, budget=look.budget, seed=look.seed)
        others[block.name] = svd.S.mean(0) / (block.alpha if look.gauge == "J/alpha" else 1.0)
    return laws, others


def _bound(twin: nn.Module, source: Source, chosen: Sequence[int], pre: Preprocessing, look: Look) -> Bound:
    return bind(twin, *_shown(twin, source, chosen, pre, look.seed, look.time), token=look.token)


def _shown(
    model: nn.Module, source: Source, chosen: Sequence[int], pre: Preprocessing, seed: int, time: float
) -> tuple[Tensor, ...]:
    """What a network is called with for some images: themselves, or noised, with the time and their labels."""
    weight = next(model.parameters())
    images = pre([source.read(int(i), max(pre.img_size)) for i in chosen]).to(weight.device, weight.dtype)
    if not isinstance(model, UViT | SiT):
        return (images,)
    own: Any = model
    noise = torch.randn(images.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(images)
    t = images.new_full((len(images),), time)
    context = [noised(own.process, images, noise, t), own.process.time_input(t)]
    if own.num_classes is not None:
        context.append(_told(own, source, chosen).to(weight.device))
    return tuple(context)


def _told(model: Any, source: Source, chosen: Sequence[int]) -> Tensor:
    """Labels as the model was told them: numbers among its own classes, those of its training images."""
    if source.labels is None:
        raise DataError(f"{source.name} has no labels, and the model is told them")
    labels, own = source.labels[list(chosen)], getattr(model, "classes", None)
    if own is None:
        return torch.from_numpy(labels)
    names = [source.classes[i] if source.classes else str(i) for i in labels]
    if others := set(names) - set(own):
        raise DataError(f"{source.name} has classes that the model was not trained on: {some(sorted(others))}")
    return torch.tensor([own.index(name) for name in names])


def _drawn(source: Source, look: Look) -> list[int]:
    """The images whose paths are drawn: so many of each of the first classes."""
    if source.labels is None:
        return balanced(source, look.per_class, look.seed)
    few = np.unique(source.labels)[:MOST_CLASSES]
    inside = np.flatnonzero(np.isin(source.labels, few))
    return inside[balanced(source.subset(inside), look.per_class * len(few), look.seed)].tolist()


def _plane(bound: Bound, look: Look) -> Tensor:
    """Streams (L + 1, N, 2) in a random plane that depends on the seed and the size of the stream alone."""
    points = stream_points(bound.blocks, bound.end, look.gauge).flatten(2).cpu().double()
    generator = torch.Generator().manual_seed(look.seed)
    plane = torch.linalg.qr(torch.randn(points.shape[2], 2, generator=generator, dtype=torch.float64))[0]
    return points @ plane


def balanced(source: Source, count: int, seed: int) -> list[int]:
    """Numbers of up to `count` images drawn by `seed`, as evenly over the classes as their number allows."""
    order = np.random.default_rng(seed).permutation(len(source))
    if source.labels is not None:
        labels = source.labels[order]
        turn = np.zeros(len(order), np.int64)  # first, second, ... of its class in the drawn order
        for c in np.unique(labels):
            turn[labels == c] = np.arange((labels == c).sum())
        order = order[np.lexsort((labels, turn))]
    return order[:count].tolist()


def preprocessing(model: nn.Module, train: Source) -> Preprocessing:
    """The network's own, or its image size with the statistics of the training images."""
    if not is_own(model):
        return preprocessing_of(model)
    body: Any = getattr(model, "encoder", model)
    own = getattr(model, "preprocessing", None) or body.preprocessing
    return own or Preprocessing(body.img_size, *train.stats(), body.in_chans)


@torch.no_grad()
def layers(
    model: nn.Module, source: Source, pre: Preprocessing, device: torch.device, seed: int = 0, time: float = 0.1
) -> tuple[dict[str, Collapse], float | None]:
    """Neural collapse of every layer's pooled features and, of a classifier, its accuracy in percent."""
    if source.labels is None:
        return {}, None
    chosen = balanced(source, COLLAPSE_IMAGES, seed)
    parts: list[dict[str, Tensor]] = []
    with frozen(model, device):
        for start in range(0, len(chosen), _BATCH):
            shown = _shown(model, source, chosen[start : start + _BATCH], pre, seed, time)
            parts.append({name: x.float().cpu() for name, x in _features(model, *shown).items()})
    read = {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
    labels = torch.from_numpy(source.labels[chosen])
    head: Any = getattr(model, "head", None)
    classifier = trained_classes(model) is not None
    decisions = read.pop("logits").argmax(1) if classifier else None
    weight = head.weight.detach().cpu() if classifier else None
    found: dict[str, Collapse] = {}
    for name, features in read.items():
        try:
            own = weight if weight is not None and features.shape[1] == weight.shape[1] else None
            found[name] = neural_collapse(features, labels, own, decisions)
        except ValueError:  # one class, one sample each, or features that are all the same
            continue
    accuracy = None if decisions is None else 100 * float((decisions == labels).double().mean())
    return found, accuracy


def _features(model: nn.Module, images: Tensor, *context: Tensor) -> dict[str, Tensor]:
    """Pooled features of every layer; of a classifier the last are those that its head sees, with its logits."""
    if not is_own(model):
        pooled_tokens: dict[str, Tensor] = {}

        def pool(name: str, tokens: Tensor) -> None:  # at once: all layers of a batch would fill a memory
            pooled_tokens[name.removesuffix(".mlp")] = tokens.mean(1)

        last_tokens = Foreign(model).forward_features(images, pool)
        return pooled_tokens | {"last": last_tokens.mean(1)}
    steps = stream(model, images, *context)
    network: Any = model
    inputs: list[Any] = [step.input for step in steps]
    last = steps[-1]
    found = {name: _pool(x) for name, x in zip(["embed", *(step.name for step in steps)], inputs)}
    if trained_classes(model) is None:
        return found | {last.name: _pool(last(inputs[-1]))}
    pooled = network.pooled(images)
    return found | {last.name: pooled, "logits": network.head(pooled)}


def _pool(x: Any) -> Tensor:
    """Streams of any network as features (B, D)."""
    if x.ndim == 4:
        return x.mean((2, 3))
    return x.mean(1) if x.ndim == 3 else x


# ---------------------------------------------------------------- along training


@dataclass(frozen=True)
class Moment:
    """One checkpoint of a run."""

    step: int
    score: float | None
    """Test accuracy of a classifier, kNN of an encoder (k = 20, mean of tokens), in percent."""
    laws: Alignment

    def to_dict(self) -> dict[str, Any]:
        return {"step": self.step, "score": self.score, "laws": self.laws.to_dict()}


def along(
    run: Path,
    splits: Splits,
    look: Look | None = None,
    *,
    device: str | torch.device = "cpu",
    each: Callable[[Moment], None] = lambda moment: None,
) -> list[Moment]:
    """The laws at every checkpoint of a run, on test images where there are some, with the score at that time."""
    look = look or Look()
    saved = checkpoints(run)
    if not saved:
        raise ValueError(f"{run} has no checkpoints; --every-checkpoint needs a run (train with --keep 0 to keep all)")
    source = splits.test if splits.test is not None and len(splits.test) else splits.train
    found: list[Moment] = []
    for path in saved:
        model = load(path, ema=False)
        check(model, splits)
        pre = preprocessing(model, splits.train)
        laws, _ = _laws(model, twin_of(model, look.precision, torch.device(device)), source, pre, look)
        score = _score(model, source, splits, pre, torch.device(device), look.seed)
        found.append(Moment(int(path.name.removeprefix("step-")), score, laws))
        each(found[-1])
    return found


def _score(
    model: nn.Module, source: Source, splits: Splits, pre: Preprocessing, device: torch.device, seed: int
) -> float | None:
    if isinstance(model, UViT | SiT):
        return None
    if trained_classes(model) is not None or source.labels is None:
        return layers(model, source, pre, device, seed)[1]
    if splits.test is None or splits.test.labels is None:
        return None
    from residua.evaluate import extract, knn

    features = extract(model, splits, limit=COLLAPSE_IMAGES, device=device, seed=seed)
    assert features.test is not None
    return knn(features.train, features.test).accuracy
