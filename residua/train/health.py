"""Is this normal? Plain words about a run that is going wrong, and what to try."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch


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
    ) -> list[str]:
        """Sentences to show after a record: `loss` over the interval, share of time spent waiting for images.

        `splits`: whether the run goes on with fewer images at once where memory runs out.
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
                    f"If it runs out, {'the batch is split by itself' if splits else 'the run stops'}; "
                    "a smaller --micro-batch or --grad-checkpointing avoids that."
                )
        fresh = [text for kind, text in found.items() if kind not in self.told]
        self.told |= set(found)
        return fresh

    def check_rank(self, entropy_rank: float, dim: int) -> list[str]:
        """After an evaluation: features that all point one way are worth nothing, whatever the loss says."""
        if entropy_rank > 0.5 or "rank" in self.told:
            return []
        self.told.add("rank")
        return [
            f"the features have nearly collapsed: entropy rank {entropy_rank:.2f} nats of at most {math.log(dim):.1f}. "
            "Early in training that is common; if it stays, look at the images (residua data preview), then try "
            "another --lr or, where shortcuts fade, a larger --alpha-min."
        ]
