"""A folder as the Hugging Face Hub has them: stock weights, our checkpoint, and a model card written from the run."""

from __future__ import annotations

import json
import math
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
import yaml
from torch import nn

from residua.evaluate.report import MODEL, Report
from residua.export.clean import Checked, Export
from residua.export.fold import ExportError
from residua.export.stock import preprocessing_of, unprepared
from residua.nn import MAE, Classifier, ResNet, SiT, UniformNet, UViT
from residua.nn.stream import residual_part
from residua.train.checkpoint import description, save_model
from residua.train.config import PretrainMachine
from residua.train.diffuse_config import DiffuseMachine
from residua.train.options import read_flat, run_of

ORCHESTRATION = {f.name for kind in (PretrainMachine, DiffuseMachine) for f in fields(kind)} - {"precision"}
"""Settings that a card has no use for."""
_PLACES = ("folder", "parquet", "imagenet")
"""Sources that are named by a path."""


def write_checkpoint(model: nn.Module, out: Path, step: int) -> None:
    """Our own, where `residua.load(folder)` finds it."""
    folder = out / "checkpoints" / f"step-{step:07d}"
    folder.mkdir(parents=True, exist_ok=True)
    save_model(model, folder / "model.safetensors", step=step)
    (folder / "model.json").write_text(json.dumps(description(model, step), indent=1))


def write_card(
    out: Path,
    place: Path,
    model: nn.Module,
    run: Path | None,
    checked: list[tuple[Export, Checked]],
    images: str,
    license: str,
    name: str | None,
    step: int,
) -> None:
    """`README.md` of a folder that will lie at `place`; with `name`, OWNER/NAME, for readers on the Hub.

    What lies above a data folder is left out.
    """
    settings = _settings(run)
    data = _short(str(settings.get("data", "unknown")))
    heads, diffusion = isinstance(model, Classifier | ResNet | UniformNet), isinstance(model, UViT | SiT)
    task = "image-classification" if heads else "image-generation" if diffusion else "image-feature-extraction"
    tags = ["residua", task]
    front: dict[str, Any] = {"license": license, "library_name": _library(checked), "tags": tags}
    pre = preprocessing_of(model)
    height, width = pre.img_size
    title = name.split("/")[-1] if name else place.name
    lines = [
        "---", yaml.safe_dump(front, sort_keys=False).strip(), "---", "", f"# {title}", "",
        f"{_kind(model)}, trained with Residua on `{data}`"
        + (f" for {step:,} steps." if step else "."), "", _shortcuts(model), "",
        f"Images: {height} x {width} px, {pre.in_chans} channels, mean {_round(pre.mean)}, std {_round(pre.std)}, "
        f"{'stretched, ' * (pre.crop_mode == 'squash')}central crop {pre.crop_pct:g}, {pre.interpolation}"
        + (" (assumed: the model does not say)." if unprepared(model) else "."), "",
        "## Load it", "",
    ]  # fmt: skip
    for export, result in checked:
        lines += [f"{export.target}:", "", "```python", export.snippet, "```", ""]
        lines += [f"Largest relative difference from the trained model: {result.largest:.1e} ({images}).", ""]
        lines += [f"{_sentence(note)}\n" for note in export.notes]
    fetched = "from huggingface_hub import snapshot_download\n" if name else ""
    where = f"snapshot_download({name!r})" if name else repr(str(place))
    lines += ["residua:", "", "```python", f"import residua\n{fetched}model = residua.load({where})"]
    lines += ['images = model.preprocessing(["photo.jpg"])', "```", ""]
    lines += ["## Scores", "", *_scores(run), ""]
    if settings:
        kept = {key: _short(value) for key, value in settings.items() if key not in ORCHESTRATION and value is not None}
        lines += ["## Training", "", "```yaml", yaml.safe_dump(kept, sort_keys=False).strip(), "```", ""]
    lines += ["## Licence", "", "Not stated." if license == "unknown" else f"`{license}`", ""]
    (out / "README.md").write_text("\n".join(lines), "utf-8")


def check_name(name: str) -> None:
    """ExportError for what is no name of a repository."""
    owner, _, model = name.partition("/")
    if not owner or not model or "/" in model:
        raise ExportError(f"--push {name}: give OWNER/NAME")


def push(out: Path, name: str, private: bool = False) -> str:
    """Upload a folder; returns its address."""
    from huggingface_hub import HfApi

    check_name(name)
    try:
        api = HfApi()
        address = api.create_repo(name, exist_ok=True, private=private)
        api.upload_folder(repo_id=name, folder_path=out, commit_message="Export from Residua")
    except Exception as error:
        why = [line.rstrip(".") for line in str(error).strip().splitlines()] or [""]
        raise ExportError(
            f"cannot upload to {name}: {type(error).__name__}: {why[0]}. The folder is complete; once signed in and "
            f"online, push it with: hf upload {name} {out}"
        ) from error
    return str(address)


def _library(checked: list[tuple[Export, Checked]]) -> str:
    return checked[0][0].target if checked else "residua"


def _kind(model: nn.Module) -> str:
    count = sum(parameter.numel() for parameter in model.parameters())
    decoder = f"{model.decoder.kind} decoder" if isinstance(model, MAE) else ""
    what = "masked autoencoder, " + decoder if decoder else type(model).__name__
    return f"Network: {what} ({count / 1e6:.3g} M parameters)"


def _shortcuts(model: nn.Module) -> str:
    shortcut = residual_part(model).shortcut
    decay, eff = shortcut.decay, shortcut.alpha_eff
    if decay.control != "none":
        what = f"an ablation that scales {'the branch' if decay.control == 'branch' else 'both'} by sqrt(0.5)"
    elif decay.schedule == "learned":
        what = "alpha learned, one for each step"
    elif eff == 1.0:
        return "Its shortcuts are ordinary, `x <- x + f(x)`."
    else:
        depth, per = shortcut.depth, shortcut.sublayers
        what = f"alpha from 1 to alpha_min = {decay.target(depth, per):.4g}, {decay.schedule} over the depth"
        if not torch.allclose(shortcut.alpha, decay.alphas(depth, per).to(shortcut.alpha)):
            what += f", on the way to which annealing had come to {float(shortcut.alpha.min()):.4g}"
    return f"Its shortcuts are `x <- alpha * x + f(x)`: {what}; alpha_eff = {eff:.3g} of the input is left at the end."


def _scores(run: Path | None) -> list[str]:
    """Tables of the run's evaluation files."""
    lines: list[str] = []
    if run is not None and (run / "evaluation.json").exists():
        report = Report.from_dict(json.loads((run / "evaluation.json").read_text("utf-8")))
        own = [s for s in report.scores if s.subject == MODEL]
        counted = f"{report.n_train:,} training and {report.n_test:,} test images ({report.test})"
        lines += [f"Frozen features, {_short(report.data)}, {counted}, read-out {report.readout}:", ""]
        lines += ["| score | read-out | layer | value |", "|---|---|---|---|"]
        lines += [f"| {s.name} | {s.settings.get('readout', report.readout)} | {s.layer} | {s} |" for s in own]
    if run is not None and (run / "finetune.json").exists():
        r = json.loads((run / "finetune.json").read_text("utf-8"))
        low, high = r["interval"]
        five = f", top-5 {r['top5']:.1f} %" if r["top5"] is not None and not math.isnan(r["top5"]) else ""
        lines += ["", f"Fine-tuned: top-1 {r['accuracy']:.1f} % (95 %: {low:.1f} to {high:.1f}){five} of "
                  f"{r['n_test']:,} images ({r['test']})."]  # fmt: skip
    return lines or ["None were computed: `residua evaluate RUN` before the export brings them here."]


def _settings(run: Path | None) -> dict[str, Any]:
    home = None if run is None else run_of(run)
    return {} if home is None else read_flat(home / "config.yaml")


def _short(value: Any) -> Any:
    """A source or path of this machine without the folders above it; names of the Hub stay whole."""
    if not isinstance(value, str) or "/" not in value or value.startswith("hf:"):
        return value
    kind, colon, rest = value.rpartition(":")
    path, mark, options = rest.partition("?")
    here = Path(path).expanduser()
    if kind not in _PLACES and not here.is_absolute() and not here.exists():
        return value
    return f"{kind}{colon}{here.name}{mark}{options}"


def _sentence(note: str) -> str:
    """With a capital and a full stop; names of Python stay as they are."""
    word = note.partition(" ")[0]
    return f"{note[0].upper() if word.isalpha() else note[0]}{note[1:]}."


def _round(values: tuple[float, ...]) -> str:
    return ", ".join(f"{value:.4g}" for value in values)
