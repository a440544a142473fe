"""Scores with everything they depend on, as a table and as JSON."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.table import Table
from torch import Tensor

from residua.disk import write_text

from .neighbors import Neighbors

MODEL, RANDOM, PIXELS = "model", "random init", "pixels"
NOTHING = "–"
GEOMETRY = {
    "participation ratio", "stable rank", "alpha-ReQ", "LiDAR", "class separation", "variance ratio", "silhouette",
}  # fmt: skip
"""Metrics that stand in a table of their own."""


@dataclass(frozen=True)
class Score:
    """One number of one subject: the model, the same encoder untrained, or raw pixels."""

    metric: str
    subject: str
    layer: int
    """Block index; -1 for pixels."""
    value: float
    unit: str
    settings: dict[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """With what it depends on: `kNN (k 20, T 0.07)`, `linear probe (lbfgs)`, `entropy rank`."""
        s = self.settings
        if self.metric == "kNN":
            return f"kNN (k {s['k']}, T {s['T']:g})"
        if self.metric == "few-shot kNN":
            return f"{s['shots']}-shot kNN (T {s['T']:g})"
        return f"{self.metric} ({s['protocol']})" if "protocol" in s else self.metric

    def checked(self) -> Score:
        """Itself, if everything in it is of its kind, as need not be what was read from a file."""
        low, high = self.settings.get("interval") or (0.0, 0.0)
        texts, numbers = (self.metric, self.subject, self.unit, self.name), (self.value, self.layer, low, high)
        if not all(isinstance(text, str) for text in texts) or not all(isinstance(x, int | float) for x in numbers):
            raise ValueError(f"a score is {vars(self)}, expected texts and numbers")
        return self

    def __str__(self) -> str:
        """As it stands in a table."""
        if math.isnan(self.value):
            return NOTHING
        digits = 2 if self.unit == "nats" or (not self.unit and abs(self.value) < 10) else 1
        spread = f" ± {self.settings['ci95']:.1f}" if self.settings.get("ci95") else ""
        return f"{self.value:.{digits}f}{spread} {self.unit}".strip()


@dataclass
class Report:
    """What `evaluate` found."""

    data: str
    readout: str
    """Several are separated by a comma and a space; each score's settings name its own."""
    layers: list[int]
    img_size: tuple[int, int]
    n_train: int
    n_test: int
    test: str
    """Where the test images came from."""
    seed: int
    scores: list[Score] = field(default_factory=list)
    probes: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Full probe results, with the held-out accuracies that chose their settings, by subject."""
    spectra: list[dict[str, Any]] = field(default_factory=list)
    """Singular values of the model's centred features, by read-out and layer, where geometry was asked for."""
    neighbors: Neighbors | None = None
    neighbor_ids: list[str] = field(default_factory=list)
    neighbor_index: Tensor | None = None
    """Rows of the neighbours' features -> names and numbers of the images in their source."""
    named_neighbors: list[dict[str, Any]] = field(default_factory=list)
    """The neighbours by name; all that a stored report keeps of them."""

    def value(self, metric: str, subject: str = MODEL, layer: int | None = None, **settings: Any) -> float:
        """One number: `value("entropy rank")`, `value("kNN", "pixels", k=10)`.

        Unless told, the layer is the last, or for the probe the one that its held-out images chose.
        """
        own = [s for s in self.scores if (s.metric, s.subject) == (metric, subject)]
        own = [s for s in own if all(s.settings.get(name) == value for name, value in settings.items())]
        if layer is not None and subject != PIXELS:
            own = [s for s in own if s.layer == layer]
        if not own:
            known = ", ".join(sorted({s.metric for s in self.scores}))
            raise KeyError(f"no {metric!r} of {subject!r} with layer {layer} and {settings}; there are {known}")
        return max(own, key=lambda s: (s.settings.get("selected", False), s.layer)).value

    def table(self) -> Table:
        """The scores side by side, with protocol, read-out, k, T and numbers of images."""
        size = " x ".join(map(str, self.img_size))
        images = f"{self.n_train:,} train and {self.n_test:,} test images ({self.test})"
        title = f"{self.data}, {size} px, read-out {self.readout}\n{images}"
        return self._table(title, self._caption(), [s for s in self.scores if s.metric not in GEOMETRY])

    def geometry_table(self) -> Table | None:
        """The further ranks and how classes lie, where they were asked for."""
        own = [s for s in self.scores if s.metric in GEOMETRY]
        caption = "LiDAR: of views of training images; silhouette: of cosine distances"
        return self._table("ranks and geometry", caption, own) if own else None

    def _table(self, title: str, caption: str, scores: list[Score]) -> Table:
        table = Table(title=title, caption=caption, title_justify="left", caption_justify="left")
        names = list(dict.fromkeys(s.name for s in scores if s.subject == MODEL))
        for heading in ("", *names):
            table.add_column(heading, justify="right" if heading else "left")
        for label, subject, layer, readout, last in self._rows():
            own = [s for s in scores if (s.subject, s.layer) == (subject, layer)]
            cells = {s.name: str(s) for s in own if s.settings.get("readout", readout) == readout}
            table.add_row(label, *(cells.get(name, NOTHING) for name in names), end_section=last)
        return table

    def _rows(self) -> list[tuple[str, str, int, str, bool]]:
        """Label, subject, layer, read-out, and whether a line follows: the model's, then the baselines'."""
        readouts = self.readout.split(", ")
        several = len(self.layers) > 1 or len(readouts) > 1
        chosen = {
            (s.layer, s.settings.get("readout", self.readout))
            for s in self.scores
            if s.subject == MODEL and s.settings.get("selected") and several
        }

        def label(layer: int, readout: str, word: str = "layer ") -> str:
            return f"{word}{layer}{f', {readout}' * (len(readouts) > 1)}"

        pairs = [(layer, readout) for readout in readouts for layer in self.layers]
        rows = [
            (label(*pair) + " *" * (pair in chosen) if several else MODEL, MODEL, *pair, pair == pairs[-1])
            for pair in pairs
        ]
        if any(s.subject != MODEL for s in self.scores):
            last = self.layers[-1]
            rows += [(label(last, r, f"{RANDOM}, ") if several else RANDOM, RANDOM, last, r, False) for r in readouts]
            rows.append((PIXELS, PIXELS, -1, "pixels", False))
        return rows

    def _caption(self) -> str:
        lines = []
        own = [s for s in self.scores if s.subject == MODEL]
        probes = [s for s in own if s.metric == "linear probe"]
        if probes:
            s = max(probes, key=lambda score: score.settings.get("selected", False)).settings
            steps = f", {s['epochs']} epochs" if s["epochs"] else ""
            lines.append(f"probe: {s['protocol']} protocol{steps}")
            several = len(self.layers) > 1 or ", " in self.readout
            what = "read-out" if len(self.layers) == 1 else "layer, read-out" if ", " in self.readout else "layer"
            chosen = f"settings{',' if ',' in what else ' and'} {what} (*)" if several else "settings"
            if s["holdout"]:
                lines.append(f"probe: {chosen} from {s['holdout']:.0%} held out of train")
        votes = [s for s in own if s.metric == "kNN"]
        for metric, found in (("kNN", votes), ("probe", probes)):
            lines += _uncertainty(metric, found)
        lines += [self._chosen(s) for s in votes if s.settings.get("chosen")][:1]
        ranks = [s for s in own if s.metric == "entropy rank"]
        if ranks:
            lines.append(f"ranks: {ranks[-1].settings['n']:,} {ranks[-1].settings['of']} images")
        if any(s.settings.get("collapsed") for s in own):
            where = {(s.layer, s.settings.get("readout", "")) for s in own if s.settings.get("collapsed")}
            lines.append("collapsed: all features alike in " + ", ".join(f"layer {i} {r}" for i, r in sorted(where)))
        return "\n".join(lines)

    def _chosen(self, score: Score) -> str:
        """Where kNN is best for images held out of the training part."""
        readout = f", {score.settings['readout']}" if ", " in self.readout else ""
        what = f"layer {score.layer}{readout}, {score.value:.1f} %"
        return f"kNN: best for images held out of train: {what}"

    def to_dict(self) -> dict[str, Any]:
        """Plain values, fit for JSON."""
        skip = {"scores", "neighbors", "neighbor_ids", "neighbor_index"}
        plain = {name: value for name, value in vars(self).items() if name not in skip}
        plain["scores"] = [vars(score) for score in self.scores]
        plain["named_neighbors"] = self.named_neighbors or self._name_neighbors()
        return plain

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Report:
        """The reverse of `to_dict`; neighbours keep their names and lose their tensors."""
        scores = [
            Score(**{**s, "value": math.nan if s["value"] is None else s["value"]}).checked() for s in values["scores"]
        ]
        height, width = values["img_size"]
        return cls(**{**values, "scores": scores, "img_size": (height, width)})

    def to_json(self) -> str:
        return json.dumps(finite(self.to_dict()), indent=2)

    def save(self, path: str | Path) -> Path:
        """Write the JSON; the file is whole or not there."""
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        write_text(path, self.to_json() + "\n")
        return path

    def _name_neighbors(self) -> list[dict[str, Any]]:
        if self.neighbors is None:
            return []
        n, name = self.neighbors, self.neighbor_ids
        return [
            {"query": name[q], "neighbors": [name[i] for i in row], "similarity": similarity}
            for q, row, similarity in zip(n.queries.tolist(), n.indices.tolist(), n.similarity.tolist())
        ]


def _uncertainty(metric: str, scores: list[Score]) -> list[str]:
    """A line on the score to quote: which it is, where there are several; its interval, and its top-5 accuracy."""
    known = [s for s in scores if "interval" in s.settings]
    if not known:
        return []
    s = max(known, key=lambda score: (score.settings.get("selected", False), score.layer))
    low, high = s.settings["interval"]
    parts = [f"95 % interval {low:.1f} to {high:.1f} (Wilson)"]
    top5 = s.settings.get("top5")
    if top5 is not None and not math.isnan(top5):
        parts.append(f"top-5 {top5:.1f} %")
    return [f"{metric}{_which(s, known)}, {s.value:.1f} %: " + ", ".join(parts)]


def _which(score: Score, among: list[Score]) -> str:
    """k, layer and read-out of a score, as far as others have another."""

    def words(s: Score) -> tuple[str, ...]:
        return f"k {s.settings.get('k')}", f"layer {s.layer}", s.settings.get("readout", "")

    told = [own for own, *all_of_them in zip(words(score), *map(words, among)) if len(set(all_of_them)) > 1]
    return f" ({', '.join(told)})" if told else ""


def finite(value: Any) -> Any:
    """JSON knows no infinity: anything not finite becomes null."""
    if isinstance(value, dict):
        return {str(k): finite(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [finite(v) for v in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
