"""Small tensors want one thread, and on a busy machine threads that sleep while they wait. Tests run beside others."""

import os
from collections.abc import Iterator

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # read when torch is imported
os.environ.pop("COLUMNS", None)  # set in workers: a console made under it keeps that width, and tests set their own

import pytest
import torch

from residua.room import cores, free_memory

WORKERS = 8  # more would wait for the longest file
MEMORY = 3 * 2**30  # of a worker and the processes that it starts
LONG = ("test_readme.py", "test_stock.py", "test_cli.py", "test_sweep_command.py")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    """One for each core, as far as memory goes."""
    return max(1, min(cores(), free_memory(torch.device("cpu")) // MEMORY, WORKERS))


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files that take long begin early, so that no worker is left alone with one of them."""
    items.sort(key=lambda item: LONG.index(item.path.name) if item.path.name in LONG else len(LONG))


@pytest.fixture(autouse=True, scope="session")
def _own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Nothing is read from or written into the user's cache."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RESIDUA_DATA", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
