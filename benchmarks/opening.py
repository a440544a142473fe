"""A large folder of images: how long a command waits for it, the first time and after, and what memory it takes.

    python benchmarks/opening.py
    python benchmarks/opening.py --images 1000000 --folder /big/disk
    python benchmarks/opening.py --tree my_photos

Without `--tree` it makes `--images` links to 500 small JPEGs in 1,000 class folders, and removes them afterwards. Every
opening is a process of its own with the cache of the one before; the first begins with an empty cache.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
from PIL import Image

CHILD = """
import json, sys, time, tracemalloc
import psutil
from residua.data import load


me, times = psutil.Process(), {}

def timed(name, call):
    start = time.perf_counter()
    found = call()
    times[name] = round(time.perf_counter() - start, 3)
    return found

if sys.argv[2] == "memory":
    tracemalloc.start()
    splits = load("folder:" + sys.argv[1])
    count = sum(len(part) for part in (splits.train, splits.test) if part is not None)
    held, peak = tracemalloc.get_traced_memory()
    print(json.dumps({"bytes an image": round(held / count, 1), "at most": round(peak / count, 1)}))
else:
    splits = timed("open", lambda: load("folder:" + sys.argv[1]))
    timed("sizes", splits.train.typical_size)
    timed("statistics", splits.train.stats)
    timed("lengths", splits.train.weights)
    timed("key of caches", getattr(splits.train, "stamp", splits.train.fingerprint))
    if hasattr(splits.train, "stamp"):
        timed("fingerprint", splits.train.fingerprint)
    print(json.dumps(times))
"""


def make_tree(folder: Path, count: int) -> Path:
    """Links, as a file may have 65,000 names on ext4."""
    random = np.random.default_rng(0)
    (folder / "base").mkdir(parents=True)
    for k in range(500):
        pixels = random.integers(0, 256, (48, 64, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(folder / "base" / f"{k}.jpg")
    for k in range(count):
        place = folder / "tree" / f"n{k % 1000:08d}"
        if k < 1000:
            place.mkdir(parents=True)
        os.link(folder / "base" / f"{k % 500}.jpg", place / f"{place.name}_{k // 1000}.JPEG")
    return folder / "tree"


def opened(tree: Path, cache: Path, what: str) -> dict[str, float]:
    env = os.environ | {"RESIDUA_DATA": str(cache)}
    done = subprocess.run([sys.executable, "-c", CHILD, str(tree), what], env=env, capture_output=True, text=True)
    if done.returncode:
        sys.exit(done.stderr)
    return json.loads(done.stdout)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=int, default=200_000)
    parser.add_argument("--folder", type=Path, help="where the tree is made; default: the folder for temporary files")
    parser.add_argument("--tree", type=Path, help="images to open instead")
    options = parser.parse_args()
    work = Path(tempfile.mkdtemp(prefix="opening-", dir=options.folder))
    try:
        tree = options.tree or make_tree(work / "images", options.images)
        for what in ("time", "memory"):
            for turn in ("first", "second"):
                print(f"{turn} opening, {what}: {opened(tree, work / what, what)}", flush=True)
    finally:
        shutil.rmtree(work)


if __name__ == "__main__":
    main()
