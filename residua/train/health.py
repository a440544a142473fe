"""Is this normal? Plain words about a run that is going wrong, and what to try."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import nn

from residua.train.options import ShortcutConfig


@dataclass
class Health:
    """Watches a run's records; each kind of trouble is told once."""

    steps: int
    told: set[str] = field(default_factory=set)
    first_loss: float | None = None
    """Of the run's first record, in this process or before it was resumed."""

    def check(
        self,
        step: int,
        loss: float,
        wait_share: float,
        device: torch.device,
        splits: bool = False,
        savers: Sequence[str] = (),
    ) -> list[str]:
        """Sentences to show after a record: `loss` over the interval, share of time spent waiting for images.

        `splits`: whether the run goes on with fewer images at once where memory runs out; `savers`: see below.
        """
        found = {}
        late = step >= max(100, 0.2 * self.steps)
        if self.first_loss is None:
            self.first_loss = loss
        elif late and loss > 0.99 * self.first_loss:
            found["loss"] = (
                f"the loss has not moved: {self.first_loss:.4f} at first, {loss:.4f} at step {step:,}. "
                "By now it should have fallen. Look at the images "
                "(residua data preview), then try a larger --lr, or a longer run if this one is very short."
            )
        if wait_share > 0.2 and step > 20:
            found["wait"] = (
                f"{100 * wait_share:.0f} % of the time went into waiting for images: the loader starves the device. "
                "Try more --workers, --cache-images auto (decodes them once) in a new run, or --resident True."
            )
        if device.type == "cuda":
            free, total = torch.cuda.mem_get_info(device)
            if free < 0.03 * total:
                found["memory"] = (
                    f"device memory is nearly full ({(total - free) / 2**30:.0f} of {total / 2**30:.0f} GiB). "
                    f"If it runs out, {'the batch is split by itself' if splits else 'the run stops'}"
                    f"{f'; what avoids that: {any_of(savers)}' if savers else ''}."
                )
        fresh = [text for kind, text in found.items() if kind not in self.told]
        self.told |= set(found)
        return fresh

    def check_rank(self, entropy_rank: float, dim: int, shortcut: ShortcutConfig) -> list[str]:
        """After an evaluation: features that all point one way are worth nothing, whatever the loss says."""
        if entropy_rank > 0.5 or "rank" in self.told:
            return []
        self.told.add("rank")
        fading = shortcut.fades_by()
        if fading is None:
            advice = "look at the images (residua data preview), then try another --lr or a longer run"
        else:
            advice = f"raise {fading}" + " or let it come in gradually (--anneal 0.5)" * (shortcut.anneal < 0.5)
        return [
            f"the features have nearly collapsed: entropy rank {entropy_rank:.2f} nats of at most {math.log(dim):.1f}. "
            f"Early in training that is common{' with strong fading' * (fading is not None)}; if it stays, {advice}."
        ]


def memory_savers(model: nn.Module, micro: int | None) -> list[str]:
    """Options by which training would take less memory; `micro`: images at once, where there can be fewer."""
    parts = list(model.modules())
    fixed = any(isinstance(part, nn.modules.batchnorm._BatchNorm) for part in parts)  # such blocks are not recomputed
    recomputed = any(getattr(part, "grad_checkpointing", False) for part in parts)
    fewer = [] if micro is None else [f"a --micro-batch below {micro}"]
    return fewer + ["--grad-checkpointing"] * (not fixed and not recomputed)


def any_of(options: Sequence[str]) -> str:
    """a; a or b; a, b, or c."""
    *first, last = options
    return f"{', '.join(first)}{',' * (len(first) > 1)} or {last}" if first else last
