from draftflow.compile_cache.caches import Requests, artefacts, hits_and_misses

COUNTS = {"fx_graph_hits": 3, "fx_graph_misses": 0, "autograd_hits": 2, "autograd_misses": 0}


def make(folder, *paths):
    for path in paths:
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_bytes(b"x")


def test_kernels_and_choices_are_told_apart_and_unfinished_ones_left_out(tmp_path):
    make(
        tmp_path,
        "triton/AAA/kernel.cubin",
        "triton/AAA/kernel.json",
        "triton/tmp.pid_1/kernel.cubin",
        "triton/BBB/kernel.hsaco",
        "inductor/ab/cab.so",
        "inductor/ab/cab.main.so",
        "inductor/cd/x.best_config",
        "inductor/fxgraph/x/y",
    )
    found = artefacts(tmp_path)
    assert found.triton == {"triton/AAA/kernel.cubin", "triton/BBB/kernel.hsaco"}
    assert found.cpp == {"inductor/ab/cab.so", "inductor/ab/cab.main.so"}
    assert found.autotune == {"inductor/cd/x.best_config"}


def test_what_came_is_a_miss_and_the_rest_of_what_was_asked_for_a_hit(tmp_path):
    make(tmp_path, "triton/AAA/kernel.cubin")
    before = artefacts(tmp_path)
    make(tmp_path, "triton/BBB/kernel.cubin", "triton/CCC/other.cubin", "inductor/cd/x.best_config")
    asked = Requests(kernels=set("abcde"), choices=set("xyz"))
    assert hits_and_misses(tmp_path, before, COUNTS, asked, libraries=4) == {
        "fx_graph": {"hits": 3, "misses": 0},
        "aot_autograd": {"hits": 2, "misses": 0},
        "triton": {"hits": 3, "misses": 2},
        "cpp": {"hits": 4, "misses": 0},
        "autotune": {"hits": 3, "misses": 1},
    }


def test_a_folder_that_is_not_there_holds_nothing(tmp_path):
    assert artefacts(tmp_path / "gone").triton == frozenset()
