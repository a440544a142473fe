"""What a process may take: of the machine, of its container or batch job, beside the other processes of a run."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from residua import room

CPU = torch.device("cpu")


@pytest.fixture
def groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine of 8 cores and 1,000 bytes, 900 of them free, whose control groups lie in this folder."""
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(8)), raising=False)
    monkeypatch.setattr("psutil.virtual_memory", lambda: SimpleNamespace(total=1000, available=900))
    monkeypatch.setattr(room, "_GROUPS", tmp_path / "cgroup")
    monkeypatch.setattr(room, "_MEMBERSHIP", tmp_path / "membership")
    return tmp_path / "cgroup"


def belong(groups: Path, membership: str, files: dict[str, str]) -> None:
    (groups.parent / "membership").write_text(membership)
    for name, text in files.items():
        path = groups / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def test_a_machine_of_its_own(groups: Path) -> None:
    assert (room.cores(), room.memory(), room.free_memory(CPU)) == (8, 1000, 900)
    belong(groups, "0::/user.slice\n", {"user.slice/memory.max": "max\n", "user.slice/cpu.max": "max 100000\n"})
    assert (room.cores(), room.memory(), room.free_memory(CPU)) == (8, 1000, 900)


def test_a_container(groups: Path) -> None:
    """Which sees its own group as the root; copies of files give way."""
    belong(groups, "0::/\n", {
        "memory.max": "500\n", "memory.current": "450\n", "cpu.max": "250000 100000\n",
        "memory.stat": "anon 300\nactive_file 40\ninactive_file 60\nshmem 50\n",
    })  # fmt: skip
    assert (room.cores(), room.memory(), room.free_memory(CPU)) == (3, 500, 150)


def test_a_batch_job_inside_a_narrower_one(groups: Path) -> None:
    belong(groups, "0::/job/step\n", {
        "job/memory.max": "400\n", "job/memory.current": "390\n", "job/cpu.max": "200000 100000\n",
        "job/step/memory.max": "800\n", "job/step/memory.current": "100\n", "job/step/cpu.max": "max 100000\n",
    })  # fmt: skip
    assert (room.cores(), room.memory(), room.free_memory(CPU)) == (2, 400, 10)


def test_groups_of_the_first_version(groups: Path) -> None:
    belong(groups, "7:cpu,cpuacct:/job\n4:memory:/job\n3:pids:/\n", {
        "cpu,cpuacct/job/cpu.cfs_quota_us": "400000\n", "cpu,cpuacct/job/cpu.cfs_period_us": "100000\n",
        "cpu,cpuacct/cpu.cfs_quota_us": "-1\n", "cpu,cpuacct/cpu.cfs_period_us": "100000\n",
        "memory/memory.limit_in_bytes": "9223372036854771712\n", "memory/memory.usage_in_bytes": "700\n",
        "memory/job/memory.limit_in_bytes": "600\n", "memory/job/memory.usage_in_bytes": "500\n",
        "memory/job/memory.stat": "active_file 1\ninactive_file 2\ntotal_active_file 30\ntotal_inactive_file 40\n",
    })  # fmt: skip
    assert (room.cores(), room.memory(), room.free_memory(CPU)) == (4, 600, 170)


def test_the_processes_of_a_run_share(groups: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    belong(groups, "0::/\n", {"memory.max": "500\n", "memory.current": "600\n", "cpu.max": "50000 100000\n"})
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert (room.cores(), room.memory(), room.free_memory(CPU)) == (1, 250, 0)
