"""A model for other libraries."""

from __future__ import annotations

from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tyro.conf import Positional

from residua.commands.calling import measured, options_of
from residua.commands.console import note, say

if TYPE_CHECKING:
    from torch import nn

    from residua.export import Result


@dataclass(frozen=True)
class Options:
    """A model for other libraries, decay folded into ordinary weights, loaded there again and compared."""

    model: Positional[str]
    """A run, a checkpoint, or published weights."""
    to: str
    """timm, transformers (ViTModel), transformers-mae (ViTMAE with its decoder), torchvision (ResNets), onnx,
    torch-export, safetensors (our own file), or hub (a folder for the Hugging Face Hub)."""
    out: str | None = None
    """Folder to write; default: export/TARGET in the run."""
    overwrite: bool = False
    """Replace an earlier export there; other files stay."""
    ema: bool = True
    """Use the moving average of the weights, where the run kept one."""
    license: str = "unknown"
    """Of a hub folder: the licence that its card names, as the Hub spells it (apache-2.0, mit, cc-by-4.0, ...)."""
    push: str | None = None
    """Of a hub folder: upload it as OWNER/NAME, with the account that `hf auth login` knows."""
    private: bool = False
    """Of --push: a private repository."""


def export(
    model: str | PathLike[str] | nn.Module,
    to: str,
    out: str | Path | None = None,
    *,
    progress: bool = False,
    **options: Any,
) -> Result:
    """Write a model for another library, as `residua export` does: load it there again, and compare.

    `model` is a run, a checkpoint, published weights or a network in memory, which is left as it is; `to` and `options`
    are those of `residua export --help`.

    >>> result = residua.export("runs/a", "timm", "a-timm")
    >>> result.largest, result.exports[0][0].snippet
    """
    return measured(progress, work, options_of(Options, options, model=model, to=to, out=out))


def work(o: Options) -> Result:
    """What the command does."""
    from residua.export import hub, write

    if o.push and o.to != "hub":
        raise ValueError(f"--push uploads hub folders: --to hub, not {o.to}")
    result = write(o.model, o.to, o.out, overwrite=o.overwrite, ema=o.ema, license=o.license, name=o.push)
    for written, checked in result.exports:
        libraries = ", ".join(f"{name} {version}" for name, version in checked.versions.items())
        say(f"{written.target}: {written.folder} ({', '.join(written.files)})")
        for name, sizes in checked.summary().items():
            say(f"  {name}: largest relative difference {sizes}")
        seen = result.images if written.ran else "its weights alone"
        say(f"  compared on {seen}, by a process with {libraries} and without residua")
        for text in written.notes:
            note(text)
        say("load it:")
        for line in written.snippet.splitlines():
            say(f"  {line}")
    if result.rounding is not None:
        say(f"for comparison, the model in float32 against itself in float64: {result.rounding:.1e}")
    for text in result.notes:
        note(text)
    if o.to == "hub":
        say(f"hub folder: {result.out} (README.md, our checkpoint, and the above)")
        if o.license == "unknown":
            note("the card states no licence: --license")
    if o.push:
        say(f"pushed: {hub.push(result.out, o.push, o.private)}")
    return result
