import gzip
import hashlib
import json
import lzma
import os
import shutil
import subprocess
import sys
import tarfile
from io import BytesIO
from pathlib import Path

import pytest

from draftflow.compile_cache import bundle, key, manifest
from draftflow.errors import DraftflowError
from draftflow.training.plan import make_plan

SHAPE = {"block_size": 8, "vocab_size": 49152, "target_layer_ids": (1, 7)}
SETTINGS = {"row_length": 256, "rows_per_step": 8, "anchors_per_row": 32, "precision": "auto"}
PLAN = make_plan(SHAPE, SETTINGS, "cpu", 1)
HELD = key.contents({"digest": "aaa", "fields": {"torch git": "70d99e9", "GPUs": ["H200"]}}, PLAN)
OTHER_TORCH = key.contents({"digest": "bbb", "fields": {"torch git": "449b176", "GPUs": ["H200"]}}, PLAN)

GRAPH, GROUP = "inductor/fxgraph/ab/key/entry", "triton/HASH/__grp__add.json"
LONG = f"triton/HASH/{'triton_tem_fused_' * 12}.cubin"  # longer than a plain tar's names


def make_cache(project):
    """A project with a warmed cache in small, as warm.py leaves it; returns warm.json."""
    folder = project / "cache" / key.cache_key(HELD)
    for path, content in ((GRAPH, os.urandom(400)), (LONG, b"\x7fELF" * 1000)):
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_bytes(content)
    group = {"child_paths": {Path(LONG).name: str(folder / LONG)}}
    (folder / GROUP).write_text(json.dumps(group))
    (folder / "inductor/locks").mkdir()
    (folder / "inductor/locks/a.lock").touch()
    manifest.write(folder)
    record = project / "step/warm.json"
    record.parent.mkdir()
    facts = {"key": folder.name, "holds": HELD, "devices": [{"device": "cuda:0", "cold": True}]}
    record.write_text(json.dumps({**facts, "folder": f"../cache/{folder.name}"}))
    return record


@pytest.fixture
def record(tmp_path):
    return make_cache(tmp_path / "here")


@pytest.fixture
def packed(record, tmp_path):
    output = tmp_path / "out/bundle.tar.xz"
    bundle.pack(record, output)
    return output


def cache_of(record):
    return (record.parent / json.loads(record.read_text())["folder"]).resolve()


def contents(folder):
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_a_bundle_brings_the_cache_to_another_place_and_nothing_else(record, packed, tmp_path):
    folder = tmp_path / "there/cache" / key.cache_key(HELD)
    before = contents(cache_of(record))
    shutil.rmtree(tmp_path / "here")
    found = bundle.unpack(packed, folder, HELD)
    assert manifest.examine(folder).sound
    after = contents(folder)
    assert set(after) == set(before) - {"inductor/locks/a.lock"}
    assert {path for path in after if after[path] != before[path]} == {GROUP}
    assert json.loads(after[GROUP])["child_paths"] == {Path(LONG).name: str(folder / LONG)}
    assert found["key"] == key.cache_key(HELD)
    assert found["holds"] == HELD
    assert found["devices"] == ["cuda:0"]
    assert found["files"] == 3
    assert os.listdir(folder.parent) == [folder.name]  # noqa: PTH208


def test_the_checksum_beside_it_is_one_that_sha256sum_checks(packed):
    line = packed.with_name("bundle.tar.xz.sha256").read_text()
    assert line == f"{hashlib.sha256(packed.read_bytes()).hexdigest()}  bundle.tar.xz\n"
    subprocess.run(["sha256sum", "--check", "bundle.tar.xz.sha256"], cwd=packed.parent, check=True)


def test_the_same_cache_makes_the_same_bytes_wherever_it_lies_and_whenever_it_was_written(record, packed, tmp_path):
    moved = tmp_path / "moved"
    (tmp_path / "here").rename(moved)
    for path in moved.rglob("*"):
        os.utime(path, (1, 1))
    (cache_of(moved / "step/warm.json") / GRAPH).chmod(0o600)
    again = tmp_path / "again.tar.xz"
    facts = bundle.pack(moved / "step/warm.json", again)
    assert again.read_bytes() == packed.read_bytes()
    assert facts["sha256"] == hashlib.sha256(packed.read_bytes()).hexdigest()


def test_what_was_unpacked_can_be_packed_again_to_the_same_bytes(record, packed, tmp_path):
    shutil.rmtree(cache_of(record))
    bundle.unpack(packed, cache_of(record), HELD)
    bundle.pack(record, tmp_path / "again.tar.xz")
    assert (tmp_path / "again.tar.xz").read_bytes() == packed.read_bytes()


def test_the_header_comes_first_and_says_what_the_bundle_is_for(packed):
    with tarfile.open(packed) as archive:
        members = archive.getmembers()
        header = json.load(archive.extractfile(members[0]))
    assert members[0].name == "bundle.json"
    assert [member.name for member in members[1:]] == sorted([GRAPH, GROUP, LONG])
    assert {(member.mtime, member.uid, member.gid, member.uname, member.mode) for member in members} == {
        (0, 0, 0, "", 0o644)
    }
    assert (header["format"], header["key"], header["holds"]) == (bundle.FORMAT, key.cache_key(HELD), HELD)


def test_what_warm_up_did_not_make_is_removed_and_not_packed(record, tmp_path):
    stranger = cache_of(record) / "inductor/stranger"
    stranger.touch()
    bundle.pack(record, tmp_path / "bundle.tar.xz")
    assert not stranger.exists()
    assert bundle.unpack(tmp_path / "bundle.tar.xz", tmp_path / "there", None)["files"] > 0
    assert not (tmp_path / "there/inductor/stranger").exists()


@pytest.mark.parametrize(
    ("harm", "words"),
    [
        (lambda folder: (folder / GRAPH).write_bytes(b"g"), f"{GRAPH} is truncated, 1 of 400 bytes"),
        (lambda folder: (folder / LONG).unlink(), "is missing"),
        (lambda folder: (folder / manifest.NAME).unlink(), "manifest.json is missing"),
    ],
)
def test_a_cache_that_is_not_sound_is_not_packed(record, tmp_path, harm, words):
    harm(cache_of(record))
    with pytest.raises(DraftflowError, match=f"{words}.*snakemake --forcerun warm_cache"):
        bundle.pack(record, tmp_path / "bundle.tar.xz")
    assert not list(tmp_path.glob("*bundle*"))


@pytest.mark.parametrize(
    ("harm", "words"),
    [
        (lambda record: record.unlink(), "was not warmed"),
        (lambda record: record.write_text("{"), "cannot be read"),
        (lambda record: record.write_text('{"folder": ".", "key": "a"}'), "cannot be read"),
        (lambda record: shutil.rmtree(cache_of(record)), "is gone"),
    ],
)
def test_without_a_warm_up_nothing_is_packed(record, tmp_path, harm, words):
    harm(record)
    with pytest.raises(DraftflowError, match=f"{words}.*snakemake --forcerun warm_cache"):
        bundle.pack(record, tmp_path / "bundle.tar.xz")


def test_a_bundle_for_something_else_is_refused_with_what_differs(packed, tmp_path):
    with pytest.raises(DraftflowError, match="warmed for something else: torch git 70d99e9 -> 449b176") as error:
        bundle.unpack(packed, tmp_path / "cache", OTHER_TORCH)
    assert error.value.where == str(packed)
    assert not (tmp_path / "cache").exists()
    bundle.unpack(packed, tmp_path / "cache", None)


def remade(packed, edit):
    """The bundle with its members [(TarInfo, content)] edited, and without the checksum that would tell at once."""
    with tarfile.open(packed) as archive:
        members = [(member, archive.extractfile(member).read()) for member in archive]
    with lzma.open(packed, "wb") as stream, tarfile.open(fileobj=stream, mode="w") as archive:
        for member, content in edit(members):
            if member.isreg():
                member.size = len(content)
            archive.addfile(member, BytesIO(content))


def with_header(change):
    def edit(members):
        header = json.loads(members[0][1])
        change(header)
        return [(members[0][0], json.dumps(header).encode()), *members[1:]]

    return edit


def with_member(name, kind=tarfile.REGTYPE, content=b"x", listed=True):
    """One member more, named in the manifest as well if `listed`."""
    member = tarfile.TarInfo(name)
    member.type, member.linkname = kind, "/etc/passwd"

    def add_to(header):
        files = header["manifest"]["files"]
        files[name] = [len(content), hashlib.sha256(content).hexdigest()]
        header["manifest"]["digest"] = manifest.digest(files)

    change = with_header(add_to) if listed else list
    return lambda members: [*change(members), (member, content if kind == tarfile.REGTYPE else b"")]


def changed(members):
    return [(member, content[::-1] if member.name == LONG else content) for member, content in members]


def newer(header):
    header["format"] = bundle.FORMAT + 1


@pytest.mark.parametrize(
    ("edit", "words"),
    [
        (with_header(newer), "has format 2, and this draftflow reads 1"),
        (with_header(lambda header: header.update(kind="photographs")), "is not a bundle.*of something else"),
        (with_header(lambda header: header.pop("format")), "is not a bundle.*of something else"),
        (with_header(lambda header: header.update(key="0" * 12)), "is damaged: its key 000000000000 is not that"),
        (with_header(lambda header: header.pop("holds")), "is damaged: its bundle.json has no holds"),
        (with_header(lambda header: header["holds"].pop("plan_id")), "is damaged: 'plan_id'"),
        (with_header(lambda header: header["manifest"].update(digest="0")), "is damaged: changed"),
        (with_header(lambda header: header["manifest"].pop("files")), "is damaged: not a manifest"),
        (lambda members: [(members[0][0], b"{"), *members[1:]], "is not a bundle"),
        (lambda members: members[1:], "is not a bundle.*does not begin with bundle.json"),
        (lambda members: [], "is not a bundle.*does not begin with bundle.json"),
        (changed, f"is damaged: {LONG} is changed"),
        (lambda members: [(m, c[:-1] if m.name == LONG else c) for m, c in members], "has 3999 bytes, not 4000"),
        (lambda members: members[:-1], f"is damaged: {LONG} is missing"),
        (lambda members: [*members, members[-1]], "is there twice"),
        (with_member("inductor/stranger", listed=False), "inductor/stranger is there twice, or not in its manifest"),
        (with_member("../outside"), "'../outside' is not a file within it"),
        (with_member("inductor/../../outside"), "is not a file within it"),
        (with_member("/tmp/outside"), "'/tmp/outside' is not a file within it"),
        (with_member("./inductor/a"), "is not a file within it"),
        (with_member("manifest.json"), "'manifest.json' is not a file within it"),
        (with_member("inductor/link", tarfile.SYMTYPE), "'inductor/link' is not a file within it"),
        (with_member("inductor/link", tarfile.LNKTYPE), "'inductor/link' is not a file within it"),
        (with_member("inductor/null", tarfile.CHRTYPE), "'inductor/null' is not a file within it"),
        (with_member("inductor/pipe", tarfile.FIFOTYPE), "'inductor/pipe' is not a file within it"),
        (with_member("inductor/folder", tarfile.DIRTYPE), "'inductor/folder' is not a file within it"),
        (with_member("inductor"), "is damaged: Is a directory"),
        (with_member(f"{GRAPH}/below"), "is damaged: File exists"),
        (with_member(f"inductor/{'a' * 300}"), "is damaged: File name too long"),
    ],
)
def test_a_bundle_that_was_tampered_with_is_refused_and_leaves_nothing(packed, tmp_path, edit, words):
    packed.with_name(packed.name + ".sha256").unlink()
    remade(packed, edit)
    with pytest.raises(DraftflowError, match=words) as error:
        bundle.unpack(packed, tmp_path / "caches/abc", HELD)
    assert error.value.where == str(packed)
    assert "\n" not in str(error.value)
    assert os.listdir(tmp_path / "caches") == []  # noqa: PTH208
    assert not (tmp_path / "outside").exists()


def cut(size):
    return lambda path: path.write_bytes(path.read_bytes()[:size])


def flipped(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize(
    ("harm", "words"),
    [
        (lambda path: path.unlink(), "There is no such bundle"),
        (cut(0), "is truncated"),
        (cut(3), "is truncated"),
        (cut(40), "is truncated"),
        (cut(-400), "is truncated"),
        (cut(-1), "is truncated"),
        (flipped, "is damaged"),
        (lambda path: path.write_bytes(b"not a bundle " * 100), "is not a bundle of a compile cache"),
        (lambda path: path.write_bytes(gzip.compress(b"not a bundle")), "is not a bundle of a compile cache"),
        (lambda path: path.write_bytes(lzma.compress(b"not a bundle" * 1000)), "is not a bundle of a compile cache"),
    ],
)
def test_a_bundle_that_did_not_arrive_whole_is_refused(packed, tmp_path, harm, words):
    packed.with_name(packed.name + ".sha256").unlink()
    harm(packed)
    with pytest.raises(DraftflowError, match=words) as error:
        bundle.unpack(packed, tmp_path / "caches/abc", HELD)
    assert error.value.where == str(packed)
    assert not list(tmp_path.glob("caches/*"))


@pytest.mark.parametrize("line", ["0" * 64 + "  bundle.tar.xz\n", "", "\xff"])
def test_a_bundle_that_does_not_agree_with_the_checksum_beside_it_is_refused(packed, tmp_path, line):
    packed.with_name(packed.name + ".sha256").write_text(line)
    with pytest.raises(DraftflowError, match=r"is damaged: its SHA-256 is .*bundle\.tar\.xz\.sha256 says"):
        bundle.unpack(packed, tmp_path / "cache", HELD)


def test_a_cache_that_is_there_is_not_touched(packed, tmp_path):
    folder = tmp_path / "cache"
    (folder / "inductor").mkdir(parents=True)
    (folder / "inductor/kernel.so").write_text("x")
    with pytest.raises(DraftflowError, match="is not empty"):
        bundle.unpack(packed, folder, HELD)
    assert contents(folder) == {"inductor/kernel.so": b"x"}
    (folder / "inductor/kernel.so").unlink()
    bundle.unpack(packed, folder, HELD)
    assert manifest.examine(folder).sound


def test_a_bundle_whose_place_cannot_be_written_is_the_disks_refusal(packed, tmp_path, monkeypatch):
    def full(path, content):
        raise OSError(28, "No space left on device", str(path))

    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(OSError, match="No space left"):
        bundle.unpack(packed, tmp_path / "caches/abc", HELD)
    assert os.listdir(tmp_path / "caches") == []  # noqa: PTH208


def test_the_stage_says_what_it_packed_and_refuses_in_one_line(record, tmp_path):
    command = [sys.executable, "-m", "draftflow.compile_cache.bundle", "pack", "--record", str(record)]
    command += ["--output", str(tmp_path / "bundle.tar.xz")]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert hashlib.sha256((tmp_path / "bundle.tar.xz").read_bytes()).hexdigest() in done.stdout
    (cache_of(record) / GRAPH).unlink()
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr.startswith("draftflow: error: ")
    assert done.stderr.count("\n") == 1
