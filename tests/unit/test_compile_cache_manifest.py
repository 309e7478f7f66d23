import hashlib
import json
import os
import shutil

import pytest

from draftflow.compile_cache import manifest

GRAPH, KERNEL = "inductor/fxgraph/ab/key/entry", "inductor/2u/kernel.so"
BINARY, GROUP = "triton/HASH/add.cubin", "triton/HASH/__grp__add.json"


def make_cache(folder):
    """A warmed cache in small: an FX graph, a C++ kernel, a Triton kernel and its group file."""
    for path, content in ((GRAPH, b"g" * 400), (KERNEL, b"\x7fELF" * 100), (BINARY, b"\x7fELFcubin")):
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_bytes(content)
    names = ("add.cubin", "add.json")
    (folder / "triton/HASH/add.json").write_text("{}")
    group = {"child_paths": {name: f"{folder.resolve()}/triton/HASH/{name}" for name in names}}
    (folder / GROUP).write_text(json.dumps(group))
    return folder


@pytest.fixture
def cache(tmp_path):
    folder = make_cache(tmp_path / "abc")
    manifest.write(folder)
    return folder


def test_every_artefact_is_listed_with_its_size_and_sha256(cache):
    written = manifest.write(cache)
    assert set(written["files"]) == {GRAPH, KERNEL, BINARY, GROUP, "triton/HASH/add.json"}
    assert written["files"][GRAPH] == [400, hashlib.sha256(b"g" * 400).hexdigest()]
    assert json.loads((cache / manifest.NAME).read_text()) == written
    examined = manifest.examine(cache)
    assert examined.sound
    assert examined.files == 5
    assert examined.bytes == sum(size for size, _ in written["files"].values())


@pytest.mark.parametrize(
    "path",
    [
        "inductor/locks/cabc.lock",
        "inductor/locks/held",
        "inductor/2u/.123.140.tmp",
        "inductor/2u/kernel_CxxBuild/kernel.o",
        "triton/HASH/tmp.pid_7_1b2c/add.cubin",
        "triton/tmp.1b2c/add.cubin",
        ".writable-7",
        ".manifest.json.7",
    ],
)
def test_locks_and_what_is_half_written_are_neither_artefacts_nor_foreign(cache, path):
    before = manifest.write(cache)
    (cache / path).parent.mkdir(parents=True, exist_ok=True)
    (cache / path).write_text("x")
    assert manifest.examine(cache).sound
    assert manifest.write(cache) == before


def replaced_by_link(path):
    aside = path.with_name("aside.tmp")
    path.rename(aside)
    path.symlink_to(aside)


def replaced_by_folder(path):
    path.unlink()
    path.mkdir()


def replaced_by_pipe(path):
    path.unlink()
    os.mkfifo(path)


@pytest.mark.parametrize(
    ("path", "harm", "words"),
    [
        (GRAPH, lambda path: path.write_bytes(b"g" * 12), "truncated, 12 of 400 bytes"),
        (GRAPH, lambda path: path.write_bytes(b""), "truncated, 0 of 400 bytes"),
        (GRAPH, lambda path: path.write_bytes(b"g" * 399 + b"h"), "changed"),
        (GRAPH, lambda path: path.write_bytes(b"g" * 401), "changed"),
        (GRAPH, lambda path: path.unlink(), "missing"),
        (GRAPH, lambda path: shutil.rmtree(path.parent.parent), "missing"),
        (KERNEL, replaced_by_link, "not a file"),
        (KERNEL, replaced_by_pipe, "not a file"),
        (KERNEL, replaced_by_folder, "missing"),
        (GROUP, lambda path: path.write_bytes(path.read_bytes()[:-9]), "changed"),
        (GROUP, lambda path: path.write_text('{"child_paths": {}}'), "changed"),
        (GROUP, lambda path: path.write_text(path.read_text().replace("/triton/", "/x/")), "names another folder"),
    ],
)
def test_damage_of_an_artefact_is_found_and_named(cache, path, harm, words):
    whole = manifest.examine(cache)
    harm(cache / path)
    examined = manifest.examine(cache)
    assert examined.damaged == {path: words}
    assert not examined.sound
    assert examined.files == whole.files - 1


@pytest.mark.parametrize(
    ("harm", "words"),
    [
        (lambda path: path.unlink(), "missing"),
        (lambda path: shutil.rmtree(path.parent), "missing"),
        (lambda path: path.write_bytes(path.read_bytes()[:-100]), "truncated, or not JSON"),
        (lambda path: path.write_bytes(b"\xff\xfe"), "truncated, or not JSON"),
        (lambda path: path.write_text("[" * 100_000), "truncated, or not JSON"),
        (lambda path: path.write_text("[]"), "not a manifest"),
        (lambda path: path.write_text('{"files": {"a": [1, 2, 3]}, "digest": ""}'), "not a manifest"),
        (lambda path: path.write_text('{"files": {"a": ["1", 2]}, "digest": ""}'), "not a manifest"),
        (lambda path: path.write_text(path.read_text().replace("400", "401")), "changed"),
        (replaced_by_link, "not a file"),
        (replaced_by_pipe, "not a file"),
    ],
)
def test_damage_of_the_manifest_is_damage_of_its_own(cache, harm, words):
    harm(cache / manifest.NAME)
    examined = manifest.examine(cache)
    assert examined.damaged == {manifest.NAME: words}
    assert (examined.foreign, examined.files, examined.sound) == ([], 0, False)


def test_what_may_not_be_read_is_damaged(cache, monkeypatch):
    def refuse(path):
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(manifest, "sha256", lambda path: refuse(path) if path.name == "kernel.so" else "0" * 64)
    assert manifest.examine(cache).damaged[KERNEL] == "unreadable: Permission denied"


def test_a_folder_that_may_not_be_listed_is_damaged_with_all_that_it_holds(cache, monkeypatch):
    scandir = os.scandir

    def refusing(path):
        if str(path).rstrip("/").endswith("triton/HASH"):
            raise PermissionError(13, "Permission denied", str(path))
        return scandir(path)

    monkeypatch.setattr(os, "scandir", refusing)
    words = "unreadable: Permission denied"
    paths = ("triton/HASH", BINARY, GROUP, "triton/HASH/add.json")
    assert manifest.examine(cache).damaged == dict.fromkeys(sorted(paths), words)
    with pytest.raises(PermissionError):
        manifest.write(cache)


@pytest.mark.parametrize(
    "plant",
    [
        lambda path: path.write_text("x"),
        lambda path: path.symlink_to("/etc/passwd"),
        lambda path: path.symlink_to(".."),
        lambda path: path.symlink_to("nowhere"),
        lambda path: os.mkfifo(path),
        lambda path: path.with_name("stranger").write_text("x"),
    ],
)
def test_what_the_manifest_does_not_name_is_foreign(cache, plant):
    plant(cache / "inductor/fxgraph/ab/key/stranger")
    examined = manifest.examine(cache)
    assert examined.foreign == ["inductor/fxgraph/ab/key/stranger"]
    assert (examined.damaged, examined.sound) == ({}, False)


def test_a_folder_that_leads_out_is_foreign_and_not_entered(cache, tmp_path):
    elsewhere = tmp_path / "elsewhere"
    (cache / "triton").rename(elsewhere)
    (cache / "triton").symlink_to(elsewhere)
    examined = manifest.examine(cache)
    assert examined.foreign == ["triton"]
    assert examined.damaged == dict.fromkeys([GROUP, BINARY, "triton/HASH/add.json"], "missing")


def test_a_symbolic_link_does_not_become_an_artefact(cache):
    before = manifest.write(cache)
    (cache / "inductor/link").symlink_to(cache / GRAPH)
    assert manifest.write(cache) == before


def test_after_a_move_the_manifest_holds_and_triton_finds_its_files(cache, tmp_path):
    moved = tmp_path / "elsewhere/abc"
    moved.parent.mkdir()
    cache.rename(moved)
    assert manifest.examine(moved).damaged == {GROUP: "names another folder"}
    assert manifest.relocate(moved) == 1
    assert manifest.examine(moved).sound
    paths = json.loads((moved / GROUP).read_text())["child_paths"]
    assert paths == {name: str(moved / "triton/HASH" / name) for name in ("add.cubin", "add.json")}
    assert manifest.relocate(moved) == 0


def test_a_copy_does_not_lead_back_to_the_folder_that_it_was_copied_from(cache, tmp_path):
    copy = tmp_path / "copy"
    shutil.copytree(cache, copy)
    manifest.relocate(copy)
    assert manifest.examine(copy).sound
    assert manifest.examine(cache).sound
    assert str(cache) + "/" not in (copy / GROUP).read_text()


@pytest.mark.parametrize(
    "harm",
    [
        lambda path: path.write_bytes(path.read_bytes()[:-9]),
        lambda path: path.write_text('{"child_paths": {"other.cubin": "/x/other.cubin"}}'),
        lambda path: path.write_text('{"child_paths": {"add.cubin": "/x/other.cubin"}}'),
        lambda path: path.unlink(),
        lambda path: (path.parents[2] / manifest.NAME).unlink(),
    ],
)
def test_relocating_does_not_hide_damage(cache, tmp_path, harm):
    moved = cache.rename(tmp_path / "moved")
    harm(moved / GROUP)
    assert manifest.relocate(moved) == 0
    assert not manifest.examine(moved).sound


@pytest.mark.parametrize("name", ["0.lock", "..tmp", ".12.34.tmp", "tmp.pid_1"])
def test_what_a_killed_compiler_left_is_removed_before_use(tmp_path, name):
    """Inductor unpickles whatever lies in the folder of an FX graph."""
    graph = tmp_path / "inductor/fxgraph/ab/key/graph"
    graph.parent.mkdir(parents=True)
    graph.write_bytes(b"graph")
    manifest.write(tmp_path)
    (graph.parent / name).write_bytes(b"half a graph")
    (tmp_path / "inductor/locks").mkdir()
    (tmp_path / "inductor/foreign").write_bytes(b"")
    found = manifest.clean(tmp_path)
    assert (found.damaged, found.foreign) == ({}, ["inductor/foreign"])
    assert {path.name for path in tmp_path.rglob("*") if path.is_file()} == {"graph", "manifest.json"}
    assert manifest.clean(tmp_path).sound
