"""What to type where a library is missing."""

import importlib.metadata
import tomllib
from pathlib import Path

import pytest

from residua import missing
from residua.missing import DISTRIBUTION, pip_install

PROJECT = tomllib.loads((Path(__file__).parent.parent / "pyproject.toml").read_text())["project"]
ONNX = ("onnx", "onnxscript", "onnxruntime")


def test_a_hint_has_the_bounds_of_the_metadata(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert PROJECT["name"] == DISTRIBUTION
    lines = [f"Metadata-Version: 2.4\nName: {DISTRIBUTION}\nVersion: 9"]
    lines += [f"Requires-Dist: {each}" for each in PROJECT["dependencies"]]
    extras = PROJECT["optional-dependencies"]
    lines += [f"Requires-Dist: {each}; extra == '{extra}'" for extra, them in extras.items() for each in them]
    (tmp_path / "residua_torch-9.dist-info").mkdir()
    (tmp_path / "residua_torch-9.dist-info" / "METADATA").write_text("\n".join(lines) + "\n")
    monkeypatch.syspath_prepend(tmp_path)
    quoted = " ".join(f"'{each}'" for each in extras["onnx"])
    assert pip_install(*ONNX) == f"pip install {quoted}"
    assert pip_install("ray", "lib") == f"pip install '{extras['ray'][0]}' lib"
    for library in ("timm", "torchvision", "transformers", "diffusers"):
        assert f"'{library}>=" in pip_install(library)


def test_a_checkout_without_metadata_names_the_libraries(monkeypatch: pytest.MonkeyPatch) -> None:
    def requires(name: str) -> list[str]:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(missing, "requires", requires)
    assert pip_install(*ONNX) == "pip install onnx onnxscript onnxruntime"
