"""The tensors in a TorchScript file, which is a program, read without running it.

Such a file is a zip archive: code, a pickle `data.pkl` of the modules and their tensors, and the numbers of each tensor
in a record of its own, `data/0`, `data/1`, ...
"""

from __future__ import annotations

import io
import math
import pickle
import zipfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

_LARGEST = 2**24  # bytes of a record; the Inception's largest has half of it in float32
_TENSOR = "torch._utils._rebuild_tensor_v2"
_STORAGES = {
    "torch.FloatStorage": torch.float32, "torch.DoubleStorage": torch.float64, "torch.HalfStorage": torch.float16,
    "torch.BFloat16Storage": torch.bfloat16, "torch.LongStorage": torch.int64, "torch.IntStorage": torch.int32,
    "torch.ShortStorage": torch.int16, "torch.CharStorage": torch.int8, "torch.ByteStorage": torch.uint8,
    "torch.BoolStorage": torch.bool,
}  # fmt: skip


def is_torchscript(path: Path) -> bool:
    """Whether a file is a TorchScript archive: a zip file that holds code."""
    if not zipfile.is_zipfile(path):
        return False
    with zipfile.ZipFile(path) as archive:
        return any("/code/" in name for name in archive.namelist())


class ScriptedTensors:
    """The tensors of a TorchScript file; none of its code runs, and no numbers are read before they are asked for."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with zipfile.ZipFile(path) as archive:
                ends = (name.partition("/") for name in archive.namelist())
                self.root = next(root for root, _, name in ends if name == "data.pkl")
                top = _Reader(io.BytesIO(_record(archive, f"{self.root}/data.pkl"))).load()
            self.found = dict(_tensors(top))
        except StopIteration:
            raise self._unreadable("it holds no data.pkl") from None
        except Exception as error:  # whatever a damaged or crafted file makes of itself
            raise self._unreadable(error) from error

    def read(self, names: Sequence[str]) -> list[Tensor]:
        try:
            with zipfile.ZipFile(self.path) as archive:
                return [self._read(archive, *self.found[name].made_of[:4]) for name in names]
        except Exception as error:
            raise self._unreadable(error) from error

    def _read(self, archive: zipfile.ZipFile, storage: Any, offset: Any, size: Any, stride: Any) -> Tensor:
        _, kind, key, *_ = storage
        numbers = bytearray(_record(archive, f"{self.root}/data/{key}"))
        values = torch.frombuffer(numbers, dtype=_STORAGES[kind.__name__])
        if math.prod(size) > len(values):
            raise ValueError(f"data/{key} holds {len(values)} numbers of a tensor of shape {size}")
        return values.as_strided(size, stride, offset)

    def _unreadable(self, why: object) -> ValueError:
        return ValueError(f"{self.path} cannot be read as TorchScript without running it: {why}")


def _record(archive: zipfile.ZipFile, name: str) -> bytes:
    if archive.getinfo(name).compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        raise ValueError(f"{name} is compressed in a way that PyTorch does not write")  # nor zipfile reads by parts
    with archive.open(name) as file:
        content = file.read(_LARGEST + 1)
    if len(content) > _LARGEST:
        raise ValueError(f"{name} is larger than any tensor that is expected")
    return content


class _Inert:
    """Stands for everything that the pickle makes by name: keeps what it is made of, and does nothing."""

    made_of: tuple[Any, ...] = ()

    def __init__(self, *made_of: Any) -> None:
        self.made_of = made_of


class _Reader(pickle.Unpickler):
    """Gives for the names that TorchScript files have an empty class each, and nothing for others."""

    def find_class(self, module: str, name: str) -> Any:
        full = f"{module}.{name}"
        own = module.partition(".")[0] == "__torch__" or module == "torch.jit._pickle"
        if not own and full not in (_TENSOR, "collections.OrderedDict", *_STORAGES):
            raise pickle.UnpicklingError(f"it holds {full}, which is not loaded as it may run code")
        return type(full, (_Inert,), {})  # new each time: a pickle can set a class's attributes

    def persistent_load(self, found: Any) -> Any:
        """A storage: word, type, record, device, count."""
        return found


def _tensors(top: Any) -> Iterator[tuple[str, _Inert]]:
    """With their names, module by module in the order of `named_parameters`."""
    waiting, seen = [("", top)], set()
    while waiting:
        prefix, module = waiting.pop()
        if id(module) in seen:
            continue
        seen.add(id(module))
        inside = [(f"{prefix}{name}", part) for name, part in vars(module).items() if isinstance(part, _Inert)]
        yield from ((name, part) for name, part in inside if type(part).__name__ == _TENSOR)
        waiting += [(f"{name}.", part) for name, part in reversed(inside) if type(part).__name__ != _TENSOR]
