"""Run folders: made by hand for what is read, and one real pair from the quick demo."""

import json
from collections.abc import Callable, Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from rich.table import Table

from residua.evaluate import Report, Score
from residua.report import demo
from residua.report import page as page_module
from residua.train.config import Pretrain

from .browser import Browser, find

SCRIPT = Path(page_module.__file__).with_name("page.js")
VOID = {"meta", "br", "hr", "img", "input", "link", "path", "use", "image", "rect", "circle", "stop"}


class Checked(HTMLParser):
    """Parses a page; knows its text, its tags, and everything that it refers to."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.text, self.tags, self.refers, self.ids, self.scripts = "", [], [], [], []
        self.open: list[str] = []
        self.feed(page)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.open.append(tag)
        for name, value in attrs:
            if name.split(":")[-1] in ("href", "src", "srcset", "action", "data", "poster"):
                self.refers.append(value or "")
            if name == "id":
                self.ids.append(value)
            assert not name.startswith("on"), f"script in {tag} {name}"
        if tag in ("meta", "link"):
            self.open.pop()

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in ("meta", "link"):
            self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        assert self.open[-1:] == [tag], f"</{tag}> closes {self.open[-3:]}"
        self.open.pop()

    def handle_data(self, data: str) -> None:
        if self.open[-1:] == ["script"]:
            self.scripts.append(data)
        elif self.open[-1:] != ["style"]:
            self.text += data


@pytest.fixture
def read_page() -> Callable[[Path], Checked]:
    """Reads a page and checks that it is well formed and needs nothing from outside."""

    def read(path: Path) -> Checked:
        page = path.read_text(encoding="utf-8")
        found = Checked(page)
        assert not found.open
        assert all(r.startswith(("data:image/png;base64,", "#")) for r in found.refers), found.refers
        assert not {"link", "iframe", "object", "img"} & set(found.tags)
        assert found.tags.count("script") == 1
        assert found.scripts == ["\n" + SCRIPT.read_text(encoding="utf-8")], "no script but the page's own"
        assert len(found.ids) == len(set(found.ids))
        assert {r[1:] for r in found.refers if r.startswith("#")} <= set(found.ids)
        assert "url(http" not in page
        assert "@import" not in page
        return found

    return read


def evaluation(knn: float = 41.5, layers: int = 3) -> Report:
    """Scores of every layer; kNN of the last is `knn`, of earlier ones less."""
    report = Report("shapes", "tokens", list(range(layers)), (16, 16), 100, 40, "test split", 0)
    for subject, offset in (("model", 0.0), ("random init", -20.0), ("pixels", -10.0)):
        for i in [-1] if subject == "pixels" else range(layers):
            below = 0 if i < 0 else layers - 1 - i
            settings: dict[str, Any] = {"k": 20, "T": 0.07}
            report.scores.append(Score("kNN", subject, i, knn + offset - below, "%", settings))
            report.scores.append(Score("entropy rank", subject, i, 1.23 + below, "nats", {"n": 40, "of": "test"}))
    return report


@pytest.fixture
def make_run(tmp_path: Path) -> Callable[..., Path]:
    """A run folder without weights: configuration, metrics and, unless `knn` is None, an evaluation."""

    def make(name: str, knn: float | None = 41.5, **settings: Any) -> Path:
        run = tmp_path / name
        run.mkdir(parents=True)
        Pretrain().override(**{"steps": 20, "batch_size": 8, "alpha_min": 0.9, "out": str(run)} | settings).save(
            run / "config.yaml"
        )
        records = [{"step": s, "loss": 1 / s, "images_per_s": 100.0} for s in (1, 10, 20)]
        (run / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records))
        if knn is not None:
            evaluation(knn).save(run / "evaluation.json")
        return run

    return make


@pytest.fixture(scope="session")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    """A headless browser, where the machine has one."""
    program = find()
    if program is None:
        pytest.skip("no Chromium, Chrome or Edge on this machine (set BROWSER_FOR_TESTS to its path)")
    found = Browser(program, tmp_path_factory.mktemp("profile"))
    yield found
    found.close()


@pytest.fixture(scope="session")
def quick_demo(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Table, list[tuple[float, str]]]:
    """Page, table and progress of the quick demo; its runs lie beside the page."""
    told: list[tuple[float, str]] = []
    page, table = demo(
        tmp_path_factory.mktemp("demo"), quick=True, on_message=lambda _: None,
        on_progress=lambda share, text: told.append((share, text)),
    )  # fmt: skip
    return page, table, told
