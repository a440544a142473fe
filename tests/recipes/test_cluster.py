"""A sweep on a Ray of this machine alone."""

import json
import socket
import sys
from pathlib import Path

import pytest

from residua import cli
from residua.missing import pip_install
from residua.recipes.cluster import check_address


def test_without_ray_it_says_how_to_get_it(tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    assert cli.main(["sweep", "--seeds", "2", "--on", "ray", "--out", str(tmp_path / "x")]) == 2
    assert pip_install("ray") in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize("address", ["127.0.0.1:{}", "ray://localhost:{}", "[::1]:{}", "127.0.0.1:none"])
def test_an_address_where_nothing_answers_is_told_at_once(address: str) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))  # and does not listen
        with pytest.raises(ValueError, match=r"no Ray cluster answers at .* see --ray-address"):
            check_address(address.format(free.getsockname()[1]))


def test_an_address_that_answers_or_is_left_to_ray_is_fine() -> None:
    with socket.create_server(("127.0.0.1", 0)) as there:
        check_address(f"ray://127.0.0.1:{there.getsockname()[1]}")
    check_address("auto")
    check_address("local")


def test_a_failing_run_on_ray_costs_the_others_nothing(tmp_path: Path, capsys) -> None:
    ray = pytest.importorskip("ray")
    args = ["sweep", "finetune", "resmlp", "--depth", "2", "--width", "8"]
    args += ["--data", "folder:nowhere", "shapes?n=48&size=16&test=16"]
    args += ["--batch-size", "16", "--steps", "2", "--cpu", "--trackers", "--on", "ray"]
    ray.init("local", num_cpus=2, num_gpus=1, include_dashboard=False, log_to_driver=False)
    try:
        assert cli.main([*args, "--gpus-per-run", "2", "--out", str(tmp_path)]) == 2
        assert "the cluster has 1" in " ".join(capsys.readouterr().err.split())
        assert cli.main([*args, "--gpus-per-run", "0.5", "--jobs", "1", "--out", str(tmp_path)]) == 2
    finally:
        ray.shutdown()
    printed = capsys.readouterr()
    assert "1 of 2 runs failed: data=folder-nowhere,seed=0-" in " ".join(printed.err.split())
    bad, good = json.loads((tmp_path / "sweep.json").read_text())["trials"]
    assert (good["status"], bad["status"]) == ("done", "failed")
    assert "folder:nowhere" in bad["error"]
    assert "accuracy" in (tmp_path / "sweep.html").read_text()
