"""The split topology trains as the colocated one does, in processes of its own. Eager, but for the run as a stage."""

import itertools
import json
import multiprocessing
import os
import signal
import socket
import time
from collections import Counter
from dataclasses import dataclass
from typing import Any

import pytest

pytest.importorskip("torch")

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from safetensors.numpy import load_file, save_file
from tiny import make_target
from training_cases import Stage, make_case, make_loop, make_settings, read_metrics, train_as_rank

from draftflow.compile_cache.guard import Guard
from draftflow.errors import DraftflowError
from draftflow.training.checkpoint import latest
from draftflow.training.data import read_rows
from draftflow.training.devices import Devices
from draftflow.training.loop import Loop, Stop
from draftflow.training.plan import plan_of_run
from draftflow.training.process import load_source, make_batches, use_device
from draftflow.training.stream import Schedule, Streamed, connect, serve
from draftflow.training.worker import hyperparameters, watched

CPU = torch.device("cpu")

# Importing takes the most time of a process here: it is done once, and all are forked from there.
multiprocessing.set_forkserver_preload(
    ["draftflow.training.loop", "torch.utils.tensorboard", "torch._inductor.compile_fx", "transformers.models.llama"]
)


def start(work, arguments, ranks):
    """Run `work(rank, *arguments)` in processes, and raise what the first of them to fail raised."""
    mp.start_processes(work, arguments, ranks, start_method="forkserver")


@pytest.fixture(scope="module")
def case(tmp_path_factory):
    return make_case(tmp_path_factory.mktemp("case"))


def schedule_of(drafters, targets, first=0, **others):
    settings = {"depth": 2, "steps": 12, "evaluate_every": 5, "held_out": 1, **others}
    return Schedule(drafters=drafters, targets=targets, first=first, **settings)


@pytest.mark.parametrize("stop", [None, 7])
def test_the_schedule_is_what_the_loop_asks_for(case, tmp_path, stop):
    def run(loop):
        asked, source, train = [], loop.process.source, loop.process.step.train

        def asking(batch):
            asked.append((batch.split, batch.indices))
            return source(batch)

        def training(batch, number):
            loop.stop.asked = number + 1 == stop
            return train(batch, number)

        loop.process.step.source, loop.process.step.train = asking, training
        loop.run()
        return asked

    loop = make_loop(case, tmp_path, evaluate_every=5)
    if stop is not None:
        run(loop)
        loop, stop = make_loop(case, tmp_path, evaluate_every=5), None
    batches = loop.process.batches
    schedule = schedule_of(1, 1, first=loop.step, held_out=len(loop.held_out))
    expected = [batches.train(number) if split == "train" else batches.held_out()[number] for split, number in schedule]
    assert run(loop) == [(batch.split, batch.indices) for batch in expected]


@pytest.mark.parametrize(("drafters", "targets"), [(1, 1), (2, 1), (1, 2), (3, 5), (4, 2)])
def test_every_batch_has_one_target_and_all_targets_the_same_share(drafters, targets):
    schedule = schedule_of(drafters, targets, steps=targets * 4)
    pieces = itertools.product(range(schedule.steps), range(drafters))
    shares = Counter(schedule.target(number, drafter) for number, drafter in pieces)
    assert set(shares) == set(schedule.target_ranks) == set(range(drafters, drafters + targets))
    assert len(set(shares.values())) == 1


def leave(rank, working, stop):
    """What a test does to a rank before it works, on a loop or a target's source: nothing."""
    return working


def as_rank(rank, drafters, targets, case, folder, training, change):
    """Be a rank of the split topology, as the worker is."""
    torch.set_num_threads(1)
    meeting = f"file://{folder}/meeting"
    dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=drafters + targets)
    stop = Stop(group=dist.new_group(list(range(drafters))))
    settings = make_settings(**training)
    _, plan = plan_of_run(settings, case["target"], "cpu", drafters)
    hyper, rows = hyperparameters(settings), read_rows(case["rows"], plan.row_length)
    batches = [make_batches(plan, hyper, rows, drafter, drafters) for drafter in range(drafters)]
    found = latest(folder / "checkpoints")
    schedule = Schedule(
        drafters,
        targets,
        depth=settings["training"]["stream_depth"],
        first=0 if found is None else found.step,
        steps=hyper.steps,
        evaluate_every=settings["training"]["evaluate_every"],
        held_out=len(batches[0].held_out()),
    )
    connect(schedule, rank, CPU)
    if rank < drafters:
        source = Streamed(schedule, rank, plan, CPU, CPU, stop)
        loop = make_loop(case, folder, rank=rank, world_size=drafters, source=source, stop=stop, **training)
        change(rank, loop, stop).run()
        source.close()
        facts = {"step": loop.step, "rows": [source.hits, source.misses], "waited": source.waiting.seconds()}
        facts["layers"] = len(loop.process.step.target.model.get_decoder().layers)
    else:
        cache_gb = settings["training"]["feature_cache_gb"]
        _, source = load_source(plan, rows, case["target"], cache_gb, use_device(plan))
        source, served = change(rank, source, stop), []
        facts = {"waited": serve(schedule, rank, source, batches, CPU, CPU, lambda: stop.asked, served.append)}
        assert served == list(range(1, len(served) + 1))
    (folder / f"{rank}.json").write_text(json.dumps(facts))
    dist.destroy_process_group()


def train_split(drafters, targets, case, folder, change=leave, **training):
    """Train in processes; what each told at its end, by rank."""
    (folder / "meeting").unlink(missing_ok=True)
    ranks = drafters + targets
    start(as_rank, (drafters, targets, case, folder, training, change), ranks)
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(ranks)]


@pytest.fixture(scope="module", params=[(2, 1), (1, 2)], ids=["2 drafters, 1 target", "1 drafter, 2 targets"])
def both(request, case, tmp_path_factory):
    """Numbers of drafters and targets, and a colocated run of as many processes as train."""
    drafters, targets = request.param
    folder = tmp_path_factory.mktemp("colocated")
    start(train_as_rank, (drafters, case, folder, {}), drafters)
    return drafters, targets, folder


def same_run(folder, other):
    assert read_metrics(folder / "metrics.jsonl") == read_metrics(other / "metrics.jsonl")
    one, two = latest(folder / "checkpoints"), latest(other / "checkpoints")
    assert one.step == two.step == 12
    assert all(torch.equal(value, two.weights()[name]) for name, value in one.weights().items())
    assert all(torch.equal(value, two.trainer()[name]) for name, value in one.trainer().items())


@pytest.mark.slow
def test_losses_and_weights_are_the_colocated_run_s_bit_for_bit(case, both, tmp_path):
    drafters, targets, colocated = both
    told = train_split(drafters, targets, case, tmp_path)
    same_run(tmp_path, colocated)
    hits, misses = told[0]["rows"]
    # 12 steps and 3 evaluations of 4 rows; drafter 0 is not told of the last half, which is the other's
    assert hits + misses == 12 * 4 + 3 * 4 - (2 if drafters == 2 else 0)
    # each row once on each target that it comes to; the row that fills up a batch, twice in the first of these
    assert 10 + 3 <= misses <= (10 + 3 + 1) * targets
    assert all(facts["waited"] > 0 for facts in told)
    assert [facts["layers"] for facts in told[:drafters]] == [0] * drafters


@dataclass(frozen=True)
class SignalTo:
    """A signal to one rank alone, while it works on step 7 (from 1)."""

    rank: int

    def __call__(self, rank, working, stop):
        if rank != self.rank:
            return working
        if isinstance(working, Loop):
            train = working.process.step.train

            def training(batch, number):
                stop.asked = number == 6
                return train(batch, number)

            working.process.step.train = training
            return working
        return SignalledSource(working, stop)


@dataclass
class SignalledSource:
    """A target's features; a signal comes while it computes for the third time in training."""

    source: Any
    stop: Stop
    trained: int = 0

    hits = property(lambda self: self.source.hits)
    misses = property(lambda self: self.source.misses)

    def __call__(self, batch):
        self.trained += batch.split == "train"
        self.stop.asked = self.trained >= 3
        return self.source(batch)


@pytest.mark.slow
@pytest.mark.parametrize("of", ["drafter", "target"])
def test_a_signal_to_any_rank_stops_all_after_one_step_and_resuming_is_exact(case, both, tmp_path, of):
    drafters, targets, colocated = both
    told = train_split(drafters, targets, case, tmp_path, SignalTo(drafters - 1 if of == "drafter" else drafters))
    steps = {facts["step"] for facts in told[:drafters]}
    # one target computes for two drafters in turn; the first of two targets computes steps 1, 3, 5
    assert steps == ({7} if of == "drafter" else {2} if drafters == 2 else {5})
    assert latest(tmp_path / "checkpoints").step in steps
    train_split(drafters, targets, case, tmp_path)
    same_run(tmp_path, colocated)


@dataclass(frozen=True)
class Counting:
    """Counts what the target has computed, and has the drafter see how far ahead that is."""

    computed: torch.Tensor
    depth: int

    def __call__(self, rank, working, stop):
        if not isinstance(working, Loop):
            return CountedSource(working, self.computed)
        source, taken = working.process.step.source, itertools.count()

        def counted(batch):
            # all that was asked for comes, and then nothing more
            ahead = min(next(taken) + self.depth, 12 + 3)
            deadline = time.monotonic() + 600
            while self.computed.item() < ahead:
                assert time.monotonic() < deadline
                time.sleep(0.01)
            time.sleep(0.05)
            assert self.computed.item() == ahead
            return source(batch)

        working.process.step.source = counted
        return working


@dataclass
class CountedSource:
    source: Any
    computed: torch.Tensor

    hits = property(lambda self: self.source.hits)
    misses = property(lambda self: self.source.misses)

    def __call__(self, batch):
        self.computed += 1
        return self.source(batch)


@pytest.mark.slow
@pytest.mark.parametrize("depth", [1, 3])
def test_a_target_runs_ahead_as_far_as_there_is_room_and_no_further(case, tmp_path, depth):
    computed = torch.zeros((), dtype=torch.int64).share_memory_()
    train_split(1, 1, case, tmp_path, Counting(computed, depth), stream_depth=depth)
    assert computed.item() == 12 + 3


@pytest.mark.slow
def test_what_a_loss_needs_beside_the_tapped_layers_comes_along(case, tmp_path):
    together, apart = tmp_path / "together", tmp_path / "apart"
    together.mkdir(), apart.mkdir()
    start(train_as_rank, (1, case, together, {"loss": "kl"}), 1)
    train_split(1, 1, case, apart, loss="kl")
    same_run(apart, together)


def skip_a_step(rank, working, stop):
    if isinstance(working, Loop):
        train = working.process.batches.train
        working.process.batches.train = lambda step: train(step + 1)
    return working


@pytest.mark.slow
def test_features_of_other_rows_than_are_wanted_are_not_trained_on(case, tmp_path):
    with pytest.raises(mp.ProcessRaisedException, match=r"came where those of \('train'.* are wanted"):
        train_split(1, 1, case, tmp_path, skip_a_step)


SPLIT = Devices("cpu", (0, 1), "cpu", target_ids=(2,))
SETTINGS = make_settings(SPLIT, steps=300, evaluate_every=100, checkpoint_every=100)


def wait_for_steps(process, run, lines=4):
    deadline, metrics = time.monotonic() + 900, run / "metrics.jsonl"
    while not (metrics.exists() and len(metrics.read_text().splitlines()) >= lines):
        assert time.monotonic() < deadline
        assert process.poll() is None, process.stdout.read()
        time.sleep(0.02)


@pytest.fixture(scope="module")
def stage(tmp_path_factory):
    folder = tmp_path_factory.mktemp("stage")
    return Stage(folder, make_case(folder), SETTINGS)


@pytest.mark.slow
def test_the_stage_stops_and_goes_on_and_records_who_did_what_and_who_waited(stage, tmp_path):
    with stage.training(SETTINGS, tmp_path) as process:
        wait_for_steps(process, tmp_path)
        process.send_signal(signal.SIGTERM)
        output = process.communicate(timeout=600)[0]
    assert process.returncode == 143, output
    assert "training on 2 x cpu, features from 1 x cpu, 300 steps" in output
    assert "Traceback" not in output
    with stage.training(SETTINGS, tmp_path) as process:
        output = process.communicate(timeout=600)[0]
    assert process.returncode == 0, output
    record = json.loads((tmp_path / "train.json").read_text())
    assert record["resumed_from"] >= 10
    assert [line["step"] for line in read_metrics(tmp_path / "metrics.jsonl") if "loss" in line][-1] == 300
    assert record["last_loss"] < record["first_loss"] - 2
    roles = ["drafter", "drafter", "target"]
    host = socket.gethostname()
    assert record["topology"] == {
        "kind": "split",
        "nodes": 1,
        "ranks": [{"rank": rank, "role": role, "device": "cpu", "host": host} for rank, role in enumerate(roles)],
    }
    waited = record["waited_seconds"]
    assert {role: len(seconds) for role, seconds in waited.items()} == {"drafter": 2, "target": 1}
    assert all(0 < seconds < record["seconds"]["total"] for seconds in itertools.chain(*waited.values()))
    assert len(record["guard"]) == 2 * 2  # of those that train, before and after the stop
    assert {guard["fx_graph_hits"] for guard in record["guard"]} == {3}
    assert {guard["fx_graph_misses"] + guard["compiles_after_warmup"] for guard in record["guard"]} == {0}
    (target,) = record["target_guard"]  # since the stop; on the CPU it compiles nothing
    assert (target["compiles"], target["fx_graph_hits"], target["compiles_after_warmup"]) == (0, 0, 0)
    assert record["feature_cache"]["hits"] > record["feature_cache"]["misses"] > 0


def test_a_target_rank_that_compiles_after_its_first_batch_ends_there():
    torch._dynamo.reset()
    guard, begun = Guard("error", warm=False), []
    served = watched(guard, lambda: begun.append(True))
    compiled = torch.compile(lambda x: x + 1, dynamic=False, backend="eager")
    for count in (1, 2):
        compiled(torch.zeros(2))
        served(count)
    compiled(torch.zeros(3))
    with pytest.raises(DraftflowError, match="1 graphs compiled after every shape had been seen"):
        served(3)
    guard.close()
    assert begun == [True]


@pytest.mark.slow
def test_a_target_that_is_killed_ends_the_run_with_its_rank_and_role(stage, tmp_path):
    with stage.training(SETTINGS, tmp_path) as process:
        wait_for_steps(process, tmp_path)
        (target,) = tmp_path.glob("draftflow-*/2.pid")
        os.kill(int(target.read_text()), signal.SIGKILL)
        output = process.communicate(timeout=600)[0]
    assert process.returncode == 1
    assert output.splitlines()[-1].startswith(
        "draftflow: error: The target process of rank 2 (cpu) was killed by signal 9, perhaps for want of memory."
    ), output


@pytest.mark.slow
def test_a_refusal_of_a_target_ends_all_in_one_line(stage, tmp_path):
    """The drafters load embedding and head alone, and do not miss a layer."""
    source = make_target(tmp_path / "model")
    tensors = load_file(source / "model.safetensors")
    del tensors["model.layers.3.mlp.up_proj.weight"]
    save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
    description = json.loads((stage.paths["target"] / "target.json").read_text())
    description["weights"]["path"] = str(source)
    (tmp_path / "target.json").write_text(json.dumps(description))
    with stage.training(SETTINGS, tmp_path / "run", target=tmp_path) as process:
        output = process.communicate(timeout=900)[0]
    assert process.returncode == 1
    assert "Traceback" not in output
    assert "The target process of rank 2 (cpu) refuses to go on" in output
    assert "1 tensors of the target are missing" in output.splitlines()[-1]
