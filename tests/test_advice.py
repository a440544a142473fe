"""Options that messages and help texts name are there, and nobody is sent to a package of another's."""

import ast
import re
from collections.abc import Iterator
from dataclasses import is_dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args, get_type_hints

import pytest
import tyro

import residua
from residua import cli
from residua.cli.sweep import OWN
from residua.evaluate.extractor import open_extractor
from residua.report.parts import load_data
from residua.report.runs import read_run
from residua.train import Diffuse, Finetune, Pretrain
from residua.train.samplefiles import check_place

ROOT = Path(residua.__file__).parent
POSITIONAL = set(tyro.conf.Positional[str].__metadata__)  # type: ignore[attr-defined]
TRAINED_ALIKE = ("checkpoint", "health", "loop", "machine", "metrics", "optim", "options", "session")
"""Files of `residua.train` whose words the user of any of the three commands may read."""


def strings_in(file: Path) -> Iterator[str]:
    """Every string of a file of Python, docstrings too."""
    nodes = (node.value for node in ast.walk(ast.parse(file.read_text("utf-8"))) if isinstance(node, ast.Constant))
    yield from (value for value in nodes if isinstance(value, str))


def named_in(file: Path) -> set[str]:
    """Options that the strings of a file name."""
    return {name for text in strings_in(file) for name in re.findall(r"(?<![\w-])--[a-z][\w-]*", text)}


def fetched_by(text: str) -> list[str]:
    """What tells pip, or somebody who types for it, to fetch this package by name: it is not on PyPI, where `residua`
    is another's."""
    text = " ".join(text.split())
    named = r"pip3? install [^`;)]*?(?<![\w./-])residua(?![\w.])"
    return re.findall(rf"{named}|residua(?:[-_]torch)?\[", text)


def options_of(kind: Any) -> Iterator[str]:
    """Options of a class of settings, in groups or not, or of several such classes."""
    if not (isinstance(kind, type) and is_dataclass(kind)):
        for part in get_args(kind):
            yield from options_of(part)
        return
    for field, hint in get_type_hints(kind, include_extras=True).items():
        name = field.replace("_", "-")
        if is_dataclass(hint):
            yield from options_of(hint)
        elif not POSITIONAL & set(getattr(hint, "__metadata__", ())):
            yield from (f"--{name}", f"--no-{name}") if hint is bool else (f"--{name}",)


class Parsed(Exception):
    """What a command parses its arguments into."""


def test_every_option_that_is_named_is_one_of_some_command(monkeypatch: pytest.MonkeyPatch) -> None:
    def parse(kind: Any, **_: Any) -> None:
        raise Parsed(kind)

    monkeypatch.setattr(tyro, "cli", parse)
    known = {"--help", "--version", "--name", "--no-name", *(f"--{name.replace('_', '-')}" for name in OWN)}
    for command in set(cli.COMMANDS) - {"sweep", "recipes"}:  # the one has its own parser, the other no options
        with pytest.raises(Parsed) as parsed:
            cli.main([command])
        known |= set(options_of(parsed.value.args[0]))
    unknown = {file.name: sorted(named_in(file) - known) for file in ROOT.rglob("*.py")}
    assert {name: options for name, options in unknown.items() if options} == {}


def test_nothing_tells_pip_to_fetch_this_package() -> None:
    for bad in (
        "pip install residua",
        "pip install -U\n  'residua-torch>=1'",
        "get `residua[onnx]`",
        "residua-torch[x]",
    ):
        assert fetched_by(bad)
    for good in ("pip install .", "`pip install '.[adapt]'`, then residua", "import residua", "residua-torch"):
        assert not fetched_by(good)
    top = ROOT.parent
    pages = [top / "README.md", top / "CONTRIBUTING.md", top / "CHANGELOG.md"]
    pages += [*(top / "docs").rglob("*.md"), top / "benchmarks" / "README.md"]
    texts = [(file, text) for file in ROOT.rglob("*.py") for text in strings_in(file)]
    texts += [(page, page.read_text("utf-8")) for page in pages]
    assert {str(file): found for file, text in texts if (found := fetched_by(text))} == {}


@pytest.mark.parametrize("kind", [Pretrain, Finetune, Diffuse])
def test_what_every_training_says_every_training_takes(kind: Any) -> None:
    known = {*options_of(kind), "--help"}
    unknown = {name: sorted(named_in(ROOT / "train" / f"{name}.py") - known) for name in TRAINED_ALIKE}
    assert {name: options for name, options in unknown.items() if options} == {}


def test_options_of_commands_are_those_of_their_help(capsys: pytest.CaptureFixture[str]) -> None:
    """Of the two ways to know them."""
    with pytest.raises(SystemExit):
        cli.main(["pretrain", "--help"])
    shown = set(re.findall(r"^[│|]?\s*(--[a-z][\w-]*)", capsys.readouterr().out, re.MULTILINE))
    assert len(shown) > 50
    assert shown - {"--help"} <= set(options_of(Pretrain))


def test_a_page_of_runs_does_not_ask_for_an_option_that_its_command_lacks(tmp_path: Path) -> None:
    config = Pretrain().override(data="folder:pictures")
    (tmp_path / "checkpoints").mkdir()
    config.save(tmp_path / "config.yaml")
    (tmp_path / "environment.json").write_text('{"cwd": "/the/start"}')
    missing: list[str] = []
    assert load_data(read_run(tmp_path), missing) is None
    assert "relative to /the/start" in missing[0]
    assert not re.findall("--[a-z]+", missing[0])


@pytest.mark.parametrize(
    "options",
    [["inception", "none.pth"], ["timm:test_vit.r160_in1k"]],
)
def test_weights_of_an_extractor_are_named_as_in_training_too(
    options: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """`residua diffuse` and `sweep` have an option of their own for them."""

    def unreachable(*_: Any, **__: Any) -> None:
        raise OSError("no route")

    monkeypatch.setattr("timm.create_model", unreachable)
    with pytest.raises(ValueError, match=r"--weights FILE.*--fid-weights FILE"):
        open_extractor(*options)


def test_where_samples_of_a_run_cannot_be_written_the_command_is_named(tmp_path: Path) -> None:
    """`residua score RUN` makes them, too, and its --out is another file."""
    (tmp_path / "file").write_text("")
    model = SimpleNamespace(preprocessing=SimpleNamespace(in_chans=3))
    with pytest.raises(ValueError, match=r"cannot be written.*residua sample --out"):
        check_place(tmp_path / "file" / "samples", model)
