"""The warmed cache on a node: unpacked once from its bundle, verified each time, never used when damaged."""

import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from test_compile_cache_bundle import GRAPH, GROUP, HELD, LONG, OTHER_TORCH, cache_of, make_cache

from draftflow.compile_cache import bundle, key, location, manifest
from draftflow.compile_cache.local import local_cache
from draftflow.environment import node_local
from draftflow.errors import DraftflowError
from draftflow.stage import Record


@pytest.fixture
def packed(tmp_path: Path) -> Path:
    """The bundle of a warmed cache, which is gone."""
    output = tmp_path / "out/bundle.tar.xz"
    bundle.pack(make_cache(tmp_path / "here"), output)
    shutil.rmtree(tmp_path / "here")
    return output


@pytest.fixture
def node(tmp_path: Path) -> Path:
    return tmp_path / "node"


def use(packed: Path, node: Path, held=HELD) -> tuple[Path, dict]:
    """Take the cache in hand and let it go; the folder, and what the record was told."""
    record = Record("train")
    with local_cache(packed, str(node), held, record) as cache:
        folder = Path(cache.environment["TORCHINDUCTOR_CACHE_DIR"]).parent
        assert manifest.examine(folder).sound
    return folder, record["cache"]


def folders(node: Path) -> list[str]:
    return sorted(path.name for path in node.glob("compile-cache/*") if path.suffix != ".lock")


def test_a_node_unpacks_the_bundle_once_and_reads_from_there(packed: Path, node: Path, monkeypatch):
    monkeypatch.setenv("DISK", str(node))
    folder, told = use(packed, "$DISK")
    digest = bundle.checked_sha256(packed)[:12]
    assert folder == node / "compile-cache" / f"{key.cache_key(HELD)}-{digest}"
    assert told == {"folder": str(folder), "files": 3, "damaged": {}, "foreign": []}
    assert str(folder / LONG) in (folder / GROUP).read_text()
    monkeypatch.setattr(bundle, "unpack", lambda *_: pytest.fail("unpacked again"))
    assert use(packed, node) == (folder, told)


def test_another_bundle_of_the_same_key_is_another_folder(packed: Path, node: Path, tmp_path: Path):
    first, _ = use(packed, node)
    again = tmp_path / "again.tar.xz"
    record = make_cache(tmp_path / "there")
    bundle.pack(record, again)
    second, _ = use(again, node)
    assert first != second
    assert (second / GRAPH).read_bytes() == (cache_of(record) / GRAPH).read_bytes() != (first / GRAPH).read_bytes()


@pytest.mark.parametrize(
    ("damage", "path", "words"),
    [
        (lambda folder: (folder / GRAPH).write_bytes(os.urandom(400)), GRAPH, "changed"),
        (lambda folder: (folder / LONG).unlink(), LONG, "missing"),
        (lambda folder: os.truncate(folder / LONG, 12), LONG, "truncated, 12 of 4000 bytes"),
        (lambda folder: (folder / manifest.NAME).unlink(), manifest.NAME, "missing"),
    ],
)
def test_a_damaged_copy_is_unpacked_anew(damage, path, words, packed: Path, node: Path, capsys):
    folder, _ = use(packed, node)
    damage(folder)
    _, told = use(packed, node)
    assert told["damaged"] == {path: words}
    assert f"is damaged ({path}: {words}); unpacking it anew" in capsys.readouterr().out
    assert use(packed, node)[1]["damaged"] == {}


def test_what_was_put_beside_is_removed(packed: Path, node: Path):
    folder, _ = use(packed, node)
    foreign = folder / GRAPH.replace("entry", "another")
    foreign.write_bytes(b"pickle")
    assert use(packed, node)[1]["foreign"] == [str(foreign.relative_to(folder))]
    assert not foreign.exists()


def _flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize("beside", [True, False])
@pytest.mark.parametrize("damage", [_flip, lambda path: os.truncate(path, 500), lambda path: path.write_bytes(b"")])
def test_a_damaged_bundle_is_refused_and_leaves_nothing(damage, beside, packed: Path, node: Path):
    damage(packed)
    if not beside:
        packed.with_name(packed.name + ".sha256").unlink()
    with pytest.raises(DraftflowError, match="snakemake bundle_cache"):
        use(packed, node)
    assert folders(node) == []


def test_a_bundle_of_another_torch_is_refused(packed: Path, node: Path):
    with pytest.raises(DraftflowError, match="warmed for something else: torch git 70d99e9 -> 449b176"):
        use(packed, node, OTHER_TORCH)
    assert folders(node) == []


def test_too_little_space_is_refused_before_anything_is_unpacked(packed: Path, node: Path, tmp_path: Path, monkeypatch):
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(node_local.shutil, "disk_usage", lambda _: usage._replace(free=location.LEAST_FREE_BYTES - 1))
    monkeypatch.setattr(bundle, "unpack", lambda *_: pytest.fail("unpacked"))
    with pytest.raises(DraftflowError, match=r"The compile cache needs 512 MiB .* environment.node_local"):
        use(packed, node)


def _read(packed: Path, node: Path, together, said) -> None:
    with local_cache(packed, str(node), HELD, Record("train")) as cache:
        together.wait(timeout=300)  # all of them hold it at the same time
        said.put(cache.environment["TORCHINDUCTOR_CACHE_DIR"])


def test_of_eight_processes_at_once_one_unpacks_and_all_read_together(packed: Path, node: Path, capfd):
    context = multiprocessing.get_context("fork")
    together, said = context.Barrier(8), context.Queue()
    processes = [context.Process(target=_read, args=(packed, node, together, said)) for _ in range(8)]
    for process in processes:
        process.start()
    found = {said.get(timeout=300) for _ in processes}
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [0] * 8
    assert len(found) == 1
    assert capfd.readouterr().out.count("from the bundle") == 1


def test_a_process_that_is_killed_leaves_nothing_that_is_used(packed: Path, node: Path):
    program = (
        "import sys, time\nfrom pathlib import Path\nsys.path.insert(0, sys.argv[3])\n"
        "from test_compile_cache_bundle import HELD\n"
        "from draftflow.compile_cache import bundle, local\nfrom draftflow.stage import Record\n"
        "def slow(path, value):\n    print('unpacked', flush=True)\n    time.sleep(60)\n"
        "bundle.write_json = slow\n"
        "with local.local_cache(Path(sys.argv[1]), sys.argv[2], HELD, Record('train')):\n    pass\n"
    )
    command = [sys.executable, "-c", program, packed, node, Path(__file__).parent]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "unpacked\n"
    (left,) = folders(node)
    process.send_signal(signal.SIGKILL)
    process.wait()
    folder, told = use(packed, node)
    assert left.endswith(".tmp")
    assert told["damaged"] == {}
    assert folders(node) == [folder.name]


def test_a_damaged_copy_is_not_taken_from_under_its_readers(packed: Path, node: Path):
    context = multiprocessing.get_context("fork")
    together, said = context.Barrier(2), context.Queue()
    reader = context.Process(target=_read, args=(packed, node, together, said))
    folder, _ = use(packed, node)
    reader.start()
    while not (busy := together.n_waiting):
        assert reader.is_alive() or busy
    (folder / LONG).unlink()
    mender = context.Process(target=use, args=(packed, node))
    mender.start()
    mender.join(timeout=0.5)
    assert mender.is_alive()
    assert not (folder / LONG).exists()
    together.wait(timeout=300)
    mender.join(timeout=300)
    assert mender.exitcode == 0
    assert manifest.examine(folder).sound
    reader.join()
