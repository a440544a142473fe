"""Features on disk, with the images they belong to."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import torch
from torch import Tensor, nn

from residua.adapt import Foreign, encoder_of
from residua.data import DataError, Feed, Source, Splits, load
from residua.data.feed import OnBadImage, Progress
from residua.disk import replacing

from .distributed import is_main, wait_for_all
from .features import (
    EncoderReader,
    ImgSize,
    Layers,
    View,
    check_readout,
    frozen,
    open_feed,
    pick_split,
    preprocessing_of,
    resolve_layers,
    undisturbed,
)
from .featureset import Readout
from .reading import in_rounds


def write_table(
    model: nn.Module,
    data: str | Splits,
    out: Path,
    *,
    layers: Layers = "last",
    readout: Readout = "tokens",
    img_size: ImgSize | None = None,
    batch_size: int = 256,
    row_group: int = 4096,
    device: str | torch.device | None = None,
    bf16: bool = False,
    on_bad_image: OnBadImage = "error",
    splits: Sequence[str] = ("train", "test"),
    progress: Progress | None = None,
) -> Path:
    """Write features to a parquet file, as `residua.embed` says, while they are computed; memory holds one row group.

    The file appears under its name when it is complete. `progress` is told of images, as by `extract`. Several
    processes share the images; the first one writes.
    """
    encoder = encoder_of(model)
    chosen = resolve_layers(layers, encoder.depth)
    reader = EncoderReader(encoder, chosen, check_readout(readout))
    data = load(data) if isinstance(data, str) else data
    sources = {name: s for name in splits if (s := pick_split(data, name)) is not None}
    if not sources:
        raise DataError(f"{data.name} has none of the splits {', '.join(splits)}")
    view = View(preprocessing_of(model, data.train, img_size), batch_size, bf16=bf16)
    about = {"data": data.name, "readout": readout, "layers": chosen, "model": encoder.config}
    about["preprocessing"] = view.preprocessing.to_dict()
    widths = encoder.widths() if isinstance(encoder, Foreign) else [encoder.embed_dim] * encoder.depth
    schema = _schema({i: widths[i] for i in chosen}).with_metadata({"residua": json.dumps(about, default=str)})

    with frozen(model, device) as where, undisturbed(), _writer(out, schema) as writer:
        for name, source in sources.items():
            with closing(open_feed(source, where, view, on_bad_image, progress)) as feed:
                _write(writer, schema, name, feed, reader, view, row_group)
    wait_for_all()
    return out


@contextmanager
def _writer(out: Path, schema: pa.Schema) -> Iterator[pq.ParquetWriter | None]:
    """Of the first process; the others write nothing."""
    if not is_main():
        yield None
        return
    out.parent.mkdir(parents=True, exist_ok=True)
    with replacing(out) as part, pq.ParquetWriter(part, schema) as writer:
        yield writer


def _write(
    writer: pq.ParquetWriter | None,
    schema: pa.Schema,
    split: str,
    feed: Feed,
    reader: EncoderReader,
    view: View,
    row_group: int,
) -> None:
    waiting: list[pa.Table] = []
    for index, features in in_rounds(feed, reader, view):
        if writer is None:
            continue
        waiting.append(_table(schema, split, feed.source, index, features))
        if sum(map(len, waiting)) >= row_group:
            writer.write_table(pa.concat_tables(waiting), row_group_size=row_group)
            waiting = []
    if writer is not None and waiting:
        writer.write_table(pa.concat_tables(waiting), row_group_size=row_group)


def _table(schema: pa.Schema, split: str, source: Source, index: Tensor, features: dict[Any, Tensor]) -> pa.Table:
    numbers = index.tolist()
    labels = [None if source.labels is None else int(source.labels[i]) for i in numbers]
    names = [None if y is None or source.classes is None else _text(source.classes[y]) for y in labels]
    vectors = [
        pa.FixedSizeListArray.from_arrays(pa.array(x[0].contiguous().numpy().ravel()), x.shape[2])
        for _, x in sorted(features.items())
    ]
    columns = [[_text(source.identify(i)) for i in numbers], [split] * len(numbers), labels, names, *vectors]
    return pa.table([pa.array(c, f.type) if isinstance(c, list) else c for c, f in zip(columns, schema)], schema=schema)


def _text(name: str) -> str:
    """Names of files need not be UTF-8; text of a table must be."""
    return os.fsencode(name).decode(errors="replace")


def _schema(widths: Mapping[int, int]) -> pa.Schema:
    fields = [("id", pa.string()), ("split", pa.string()), ("label", pa.int64()), ("class", pa.string())]
    return pa.schema(fields + [(f"layer_{i}", pa.list_(pa.float32(), dim)) for i, dim in widths.items()])
