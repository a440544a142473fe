"""Every command and snippet of the README runs, in order, in one folder with a few small images."""

import re
import shlex
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

import residua
from residua import cli

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, flags=re.DOTALL)


def whole(block: str) -> str:
    """Lines that a backslash continues, in one."""
    return re.sub(r"\\\n\s*", "", block)


def commands() -> list[str]:
    lines = [line.split(" #")[0].strip() for block in blocks("bash") for line in whole(block).splitlines()]
    return [line for line in lines if line]


def save_images(folder: Path, count: int) -> None:
    folder.mkdir()
    source = residua.data.load(f"shapes?n={count}&size=16&test=8").train
    for i in range(count):
        Image.fromarray(source.read(i)).save(folder / f"{i}.png")


def save_parquet(folder: Path, count: int) -> None:
    """A little data set in the Hugging Face layout."""
    folder.mkdir()
    rng = np.random.default_rng(0)
    for split in ("train", "valid"):
        images = []
        for _ in range(count):
            path = folder / "one.png"
            Image.fromarray(rng.integers(0, 256, (64, 64, 3), dtype=np.uint8)).save(path)
            images.append({"bytes": path.read_bytes(), "path": None})
            path.unlink()
        table = pa.table({"image": images, "label": [i % 2 for i in range(count)]})
        pq.write_table(table, folder / f"{split}-00000-of-00001.parquet")


@pytest.fixture(scope="module")
def workdir(tmp_path_factory):
    folder = tmp_path_factory.mktemp("readme")
    save_images(folder / "my_photos", 24)
    (folder / "my_classes").mkdir()
    for name in ("cats", "dogs"):
        save_images(folder / "my_classes" / name, 10)
    save_parquet(folder / "tiny-imagenet-100", 8)
    return folder


def test_readme_names_commands_that_exist():
    assert commands()
    for line in commands():
        program, name = shlex.split(line)[:2]
        if program == "make":
            assert re.search(rf"^{name}:", (ROOT / "Makefile").read_text(), flags=re.MULTILINE)
        elif program == "residua":
            assert name in cli.COMMANDS
        else:
            assert line == "pip install ."


def test_readme_runs_from_top_to_bottom(workdir, monkeypatch, capsys):
    monkeypatch.chdir(workdir)
    for line in commands():
        program, *args = shlex.split(line)
        if program != "residua":
            continue
        if args[0] == "sweep":  # days of a CPU otherwise
            args[args.index("--seeds") + 1] = "1"
            args += ["--size", "nano", "--steps", "2"]
        elif args[0] == "pretrain" and not {"mae-tiny-imagenet", "--steps", "--resume"} & {*args}:
            args += ["--steps", "5"]  # minutes otherwise
        elif "--limit" in args:
            args[args.index("--limit") + 1] = "100"  # most of a minute otherwise
        elif args[0] == "diffuse":
            args += ["--sample-every", "0"]  # previews take longer than so short a run
        elif "mae-tiny-imagenet" in args:
            args.append("--dry-run")  # hours of a CPU otherwise; everything is checked and three steps are run
        status = cli.main(args)
        assert status == 0, f"{line}\n{capsys.readouterr().err}"
    scope: dict = {}
    for snippet in blocks("python"):
        exec(compile(snippet, "README.md", "exec"), scope)
    assert scope["feats"].test.last.shape[0] == 1024
    assert scope["taps"]["blocks.3.attn"].ndim == 3


def test_documents_link_to_files_that_exist():
    for page in [ROOT / "README.md", *(ROOT / "docs").glob("*.md"), ROOT / "benchmarks" / "README.md"]:
        for target in re.findall(r"\]\(([^)#]+)\)", page.read_text()):
            if not target.startswith("http"):
                assert (page.parent / target).exists(), f"{page.name} links to {target}"
