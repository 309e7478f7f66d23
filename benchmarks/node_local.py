"""What packing an environment for nodes takes, and a copy of it, compressed or not; for docs/node-local.md.

    PYTHONPATH=src <venv>/bin/python benchmarks/node_local.py --venv results/environments/<env_id>/venv --work /scratch

Everything lies below `--work`, on one disk, is removed at the end, and takes three times the size of the environment.
A network file system is slower, where it is read by many nodes at once by their number: its share of the time is the
archive's bytes over the bytes per second that a node gets. Standard library only.
"""

import argparse
import gzip
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from draftflow.environment import archive, node_local
from draftflow.environment import record as records
from draftflow.stage import sha256

MEBIBYTE = 2**20


def seconds(call: Callable[[], object]) -> float:
    """How long a call takes."""
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def compress(source: Path, target: Path) -> None:
    """gzip at its fastest."""
    with source.open("rb") as read, gzip.open(target, "wb", 1) as write:
        shutil.copyfileobj(read, write, MEBIBYTE)


def decompress(source: Path) -> None:
    """gzip to nowhere."""
    with gzip.open(source) as read:
        while read.read(MEBIBYTE):
            pass


def main() -> None:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--venv", type=Path, required=True)
    parser.add_argument("--work", type=Path, required=True)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=arguments.work) as name:
        work = Path(name)
        environment = work / "environment"
        packed = environment / archive.NAME
        environment.mkdir()
        shutil.copytree(arguments.venv, environment / "venv", symlinks=True)
        rows = [("pack, all bytecode made", seconds(lambda: archive.pack(environment / "venv", packed)))]
        rows.append(("pack again", seconds(lambda: archive.pack(environment / "venv", packed))))
        shutil.rmtree(environment / "venv")
        sizes = {"uncompressed": packed.stat().st_size}
        print(f"a copy takes {archive.needed_bytes(packed) / 1e9:.2f} GB")
        small = work / "gz"
        rows.append(("gzip 1: compress", seconds(lambda: compress(packed, small))))
        sizes["gzip 1"] = small.stat().st_size
        rows.append(("gzip 1: decompress", seconds(lambda: decompress(small))))
        small.unlink()
        if shutil.which("zstd"):
            rows.append(("zstd 1: compress", seconds(lambda: run("zstd", "-1", "-q", packed, "-o", small))))
            sizes["zstd 1"] = small.stat().st_size
            rows.append(("zstd 1: decompress", seconds(lambda: run("zstd", "-d", "-q", "-f", "-c", small))))
            small.unlink()
        rows.append(("read the archive and hash it", seconds(lambda: sha256(packed))))
        rows.append(("first start on a node", seconds(lambda: node_local.local_copy(environment, str(work / "node")))))
        rows.append(("later start on a node", seconds(lambda: node_local.local_copy(environment, str(work / "node")))))
        venv = node_local.local_copy(environment, str(work / "node"))
        rows.append(("of the first: RECORDs", seconds(lambda: records.inspect(archive.site_packages(venv)))))
        for what, size in sizes.items():
            print(f"| {what} | {size / 1e9:.2f} GB |")
        for what, value in rows:
            print(f"| {what} | {value:.2f} s |")


def run(*command: object) -> None:
    """Run a command, its output thrown away."""
    subprocess.run([*map(str, command)], check=True, stdout=subprocess.DEVNULL)


if __name__ == "__main__":
    main()
