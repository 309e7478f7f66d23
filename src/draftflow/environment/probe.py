"""The probe: what torch build an interpreter has, what it would compile with, and whether compiling survives threads.

Given to the interpreter through stdin, here or behind any number of hops, so that no shell ever reads it:

    ssh gpu1 pct exec 200 -- /opt/venv/bin/python - < probe.py

Arguments, both optional: seconds for everything (120), and of these at most so many for the trial of the race (40; 0
for no trial). Needs nothing but Python 3.8 and its standard library. Prints a mark when it is reached, and at the end
one line of JSON between two marks; all else that arrives on stdout is a login script's or a library's. The report:

fields        what two machines are compared by: name -> text, number, truth value, list of texts or null
information   what differs between any two machines or hours
caches        kind -> {"path", "exists", "bytes", "files", "newest_hours", "oldest_hours", "whole"}
race          {"affected": true, false or null, "why", "trials", "failed", "errors": {kind: trials}, "seconds"}
problems      a sentence each: what could not be told, or does not fit together

torch is imported in child processes alone: an import that crashes or hangs is a fact to report. The children are forks,
since this text is in no file that another interpreter could be given.
"""

import sys

# Python looks into the working directory first when its program comes from stdin. The standard library goes before it
# here, and `main` takes it out: a clone of torch in somebody's home is not the torch of this environment.
sys.path.sort(key=lambda folder: folder == "")

import collections
import ctypes
import getpass
import importlib
import importlib.util
import json
import logging
import os
import platform
import resource
import select
import shutil
import signal
import subprocess
import tempfile
import threading
import time
import traceback
import warnings
from importlib import metadata
from pathlib import Path
from typing import Any

# Put together here, so that an echo of this text holds none of them.
_MARK = "draftflow-probe"
STARTED, BEGIN, END = _MARK + "-started", _MARK + "-begin", _MARK + "-end"

# Where the race is common two trials settle it; where it is rare, six find it nine times of ten.
TRIALS, SETTLED, FEWEST = 6, 2, 3

# A shape each, for every role: the more is compiled, the longer the threads meet.
SHAPES = 4

# What begins so switches compilation off or changes it; a trial under it would find every build safe.
SWITCHED_OFF = ("TORCH_COMPILE_", "TORCHDYNAMO_")

_PREFIXES = ("TORCHINDUCTOR_", "TORCHDYNAMO_", "TORCH_DYNAMO_", "TORCH_COMPILE_", "TRITON_", "CUDA_VISIBLE_DEVICES")

# A folder of a million files on a network must not use up the time of the probe.
_SECONDS_PER_CACHE = 5
ENDING = (signal.SIGTERM, signal.SIGHUP)  # end the probe, which first clears up


def report(seconds, trial_seconds):
    """The whole report, in `seconds` at most, of which the trial of the race gets `trial_seconds` at most."""
    start = time.monotonic()
    result: Any = {"fields": {}, "information": {}, "caches": {}, "race": {}, "problems": []}

    def add(facts):
        for part, found in facts.items():
            result[part] = result[part] + found if part == "problems" else {**result[part], **found}

    def left():
        return seconds - (time.monotonic() - start)

    for section in (machine, variables, driver, installed):
        add(section())
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ENDING)
    folder = tempfile.mkdtemp(prefix="draftflow-probe-")
    try:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        if result["fields"]["torch"] is None:
            result["race"] = unknown("there is no torch")
        else:
            messages, ending = in_child(lambda send: torch_facts(send, folder), left() - 2, leader=True)
            for message in messages:
                add(message)
            if ending:
                add({"problems": [f"torch cannot be imported or asked: {ending}."]})
            result["race"] = race(folder, min(trial_seconds, left() - 2), result["fields"])
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    words = {True: "affected", False: "not seen", None: "unknown"}
    result["fields"]["compile race"] = words[result["race"]["affected"]]
    result["caches"] = caches(result["information"])
    result["problems"] += contradictions(result["fields"])
    result["information"]["seconds"] = round(time.monotonic() - start, 1)
    return result


def in_child(work, seconds, leader=False):
    """Run `work(send)` in a fork of this process.

    Args:
        seconds: after which it is killed.
        leader: it is killed with all that it started.

    Returns:
        What it sent, and how it ended: None if well, else in words ("died by SIGSEGV").
    """
    reading, writing = os.pipe()
    sys.stdout.flush()
    sys.stderr.flush()
    text, deadline, late = b"", time.monotonic() + seconds, True
    # What is raised in a hook of fork is lost, and what is raised behind fork leaves the child alone.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ENDING)
    pid = os.fork()
    if pid == 0:
        os.close(reading)
        _child(work, writing, leader)
    try:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        os.close(writing)
        while select.select([reading], [], [], max(0, deadline - time.monotonic()))[0]:
            piece = os.read(reading, 65536)
            if not piece:
                late = False
                break
            text += piece
    finally:
        os.close(reading)
        if late:
            _kill(pid, leader)
        status = os.waitpid(pid, 0)[1]
    messages = [json.loads(line) for line in text.decode().splitlines(keepends=True) if line.endswith("\n")]
    if late:
        return messages, f"no end after {max(0, seconds):.0f} s"
    if os.WIFSIGNALED(status):
        return messages, f"died by {signal.Signals(os.WTERMSIG(status)).name}"
    if status:
        return messages[:-1], messages[-1]["error"]
    return messages, None


def _child(work, writing, leader):
    code = 1
    stream = os.fdopen(writing, "w")

    def send(message):
        stream.write(json.dumps(message) + "\n")
        stream.flush()

    try:
        if leader:
            os.setpgid(0, 0)
        for number in ENDING:
            signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, ENDING)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        work(send)
        code = 0
    except BaseException as error:
        send({"error": kind(error)})
    finally:
        os._exit(code)


def _kill(pid, leader):
    try:
        os.kill(-pid if leader else pid, signal.SIGKILL)
    except ProcessLookupError:  # not yet the leader of its group
        os.kill(pid, signal.SIGKILL)


def kind(error):
    """An exception in a line that is the same wherever it happens; where it has no text, its place."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if "symbolically trace a dynamo-optimized function" in str(error):
        text = "FX tracing met a compiled function (Detected that you are using FX to symbolically trace ...)"
    elif lines and "Traceback" not in lines[0]:
        text = " ".join(lines[:2])[:160]
    else:
        place = traceback.extract_tb(error.__traceback__)[-1]
        text = f"at {Path(place.filename).name}:{place.lineno}"
    return f"{type(error).__name__}: {text}"


def machine():
    """Host, system and interpreter."""

    def first(path, key, separator):
        try:
            lines = Path(path).read_text(errors="replace").splitlines()
        except OSError:
            return None
        return next((line.split(separator, 1)[1].strip(' "') for line in lines if line.startswith(key)), None)

    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # a container with a user id and no name
        user = str(os.getuid())
    return {
        "fields": {"Python": platform.python_version()},
        "information": {
            "interpreter": sys.executable,
            "prefix": sys.prefix,
            "host": platform.node(),
            "user": user,
            "system": first("/etc/os-release", "PRETTY_NAME", "="),
            "kernel": platform.release(),
            "CPU": first("/proc/cpuinfo", "model name", ":"),
            "CPU cores": os.cpu_count(),
            "memory": first("/proc/meminfo", "MemTotal", ":"),
            "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        },
    }


def variables():
    """What the environment sets of torch's and triton's settings; paths differ between machines and say nothing."""
    found = {name: value for name, value in sorted(os.environ.items()) if name.startswith(_PREFIXES)}
    paths = [name for name, value in found.items() if os.sep in value or name.endswith(("_DIR", "_PATH", "_HOME"))]
    return {
        "fields": {name: value for name, value in found.items() if name not in paths},
        "information": {name: found[name] for name in paths},
    }


def driver():
    """The NVIDIA driver and its GPUs, as the machine has them whatever torch sees."""
    fields: dict = {"driver": None, "CUDA driver": None, "GPUs of the driver": []}
    problems = []
    loaded = Path("/sys/module/nvidia/version")
    if loaded.exists():
        fields["driver"] = loaded.read_text().strip()
    version = ctypes.c_int()
    try:
        ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(version))
        fields["CUDA driver"] = f"{version.value // 1000}.{version.value % 1000 // 10}"
    except (OSError, AttributeError):
        pass
    if shutil.which("nvidia-smi"):
        query = ["nvidia-smi", "--query-gpu=name,compute_cap,memory.total,driver_version", "--format=csv,noheader"]
        try:
            answer = subprocess.run(query, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=20)
        except (OSError, subprocess.TimeoutExpired) as error:
            problems.append(f"nvidia-smi does not answer: {kind(error)}.")
        else:
            if answer.returncode:
                said = ((answer.stdout + answer.stderr).strip().splitlines() or ["no message"])[0]
                problems.append("nvidia-smi fails with status {}: {}.".format(answer.returncode, said.rstrip(".")))
            else:
                rows = [[cell.strip() for cell in row.split(",")] for row in answer.stdout.strip().splitlines()]
                fields["GPUs of the driver"] = counted("{}, capability {}, {}".format(*row[:3]) for row in rows)
                fields["driver"] = fields["driver"] or (rows[0][3] if rows else None)
    return {"fields": fields, "problems": problems}


def counted(names):
    """["8 x NVIDIA H200"] of eight times the same."""
    return [f"{number} x {name}" for name, number in collections.Counter(names).items()]


def installed():
    """Versions as the packages say them, without importing anything; null where there is none."""
    fields: dict = {}
    for name in ("torch", "triton"):
        fields[name] = None
        if importlib.util.find_spec(name) is not None:
            try:
                fields[name] = metadata.version(name)
            except metadata.PackageNotFoundError:
                fields[name] = "of unknown version"
    return {"fields": fields}


def torch_facts(send, folder):
    """Send what torch says of itself, section by section: a crash in one keeps those before."""
    os.environ.update(_caches_in(folder))
    with warnings.catch_warnings(record=True):
        warnings.simplefilter("always")
        import torch
    for section in (_build, _libraries, _gpus, _flex, _dynamo, _inductor_folder):
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            try:
                send(section(torch))
            except Exception as error:
                send({"problems": [f"torch does not tell ({section.__name__[1:]}): {kind(error)}."]})
        if section is _gpus:  # a driver that is too old is said in a warning alone
            send({"problems": [" ".join(str(one.message).split()) for one in said]})


def _build(torch):
    fields = {
        "torch": torch.__version__,
        "torch git": torch.version.git_version,
        "torch CUDA": torch.version.cuda,
        "torch C++11 ABI": torch.compiled_with_cxx11_abi(),
    }
    if getattr(torch.version, "hip", None):
        fields["torch HIP"] = torch.version.hip
    return {"fields": fields, "information": {"torch": str(Path(torch.__file__).parent)}}


def _libraries(torch):
    nccl = torch.cuda.nccl.version() if torch.distributed.is_nccl_available() else None
    return {
        "fields": {
            "cuDNN": torch.backends.cudnn.version(),
            "NCCL": None if nccl is None else ".".join(map(str, nccl)),
        }
    }


def _gpus(torch):
    names = []
    for index in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        one = torch.cuda.get_device_properties(index)
        capability, memory = f"{one.major}.{one.minor}", round(one.total_memory / 2**30)
        names.append(f"{one.name}, capability {capability}, {one.multi_processor_count} SMs, {memory} GiB")
    return {"fields": {"GPUs of torch": counted(names)}}


def _flex(torch):
    # `torch._higher_order_ops.flex_attention` is the operator in some versions and the module in others
    operators = importlib.import_module("torch._higher_order_ops.flex_attention")
    attention = importlib.import_module("torch.nn.attention.flex_attention")
    fields = {"flex_attention operator": operators.flex_attention.name()}
    for name in ("flex_attention", "flex_attention_backward"):
        operator = getattr(operators, name)
        entries = [str(key).rpartition(".")[2] for key in operator.py_kernels]
        entries += [mode.__name__ for mode in operator.python_key_table]
        entries += [str(key) for key in operator.functorch_table]
        fields[name + " dispatch"] = sorted(entries)
    switch = "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG"
    fields["flex_attention " + switch] = getattr(attention, switch, None)
    return {"fields": fields}


def _dynamo(torch):
    dynamo = importlib.import_module("torch._dynamo.config")
    inductor = importlib.import_module("torch._inductor.config")
    names = ["recompile_limit", "accumulated_recompile_limit", "fail_on_recompile_limit_hit"]
    names += ["error_on_nested_fx_trace", "suppress_errors", "disable"]
    fields = {"dynamo " + name: getattr(dynamo, name, None) for name in names}
    fields["inductor force_disable_caches"] = getattr(inductor, "force_disable_caches", None)
    return {"fields": fields}


def _inductor_folder(torch):
    try:
        module = importlib.import_module("torch._inductor.runtime.cache_dir_utils")
    except ImportError:
        module = importlib.import_module("torch._inductor.runtime.runtime_utils")
    return {"information": {"inductor cache by default": module.default_cache_dir()}}


def _caches_in(folder):
    """Variables under which nothing that the probe does reaches the user's own caches."""
    return {"TORCHINDUCTOR_CACHE_DIR": folder + "/inductor", "TRITON_CACHE_DIR": folder + "/triton"}


def caches(information):
    """Path, size and age of the folders that this environment would compile into."""
    guess = str(Path(tempfile.gettempdir()) / "torchinductor_{}".format(information["user"]))
    inductor = os.environ.get("TORCHINDUCTOR_CACHE_DIR") or information.get("inductor cache by default") or guess
    home = os.environ.get("TRITON_HOME") or str(Path("~").expanduser())
    triton = os.environ.get("TRITON_CACHE_DIR") or str(Path(home) / ".triton" / "cache")
    return {"inductor": _measure(inductor), "triton": _measure(triton)}


def _measure(folder):
    size, files, newest, oldest, now = 0, 0, 0.0, float("inf"), time.time()
    deadline, whole = time.monotonic() + _SECONDS_PER_CACHE, True
    for parent, _, names in os.walk(folder):
        for name in names:
            try:
                status = Path(parent, name).lstat()
            except OSError:
                continue
            size, files = size + status.st_size, files + 1
            newest, oldest = max(newest, status.st_mtime), min(oldest, status.st_mtime)
        if time.monotonic() > deadline:
            whole = False
            break
    return {
        "path": folder,
        "exists": Path(folder).is_dir(),
        "bytes": size,
        "files": files,
        "newest_hours": round((now - newest) / 3600, 2) if files else None,
        "oldest_hours": round((now - oldest) / 3600, 2) if files else None,
        "whole": whole,
    }


def contradictions(fields):
    """What does not fit together, a sentence each."""
    found = []
    there, seen = fields["GPUs of the driver"], fields.get("GPUs of torch")
    if there and seen == []:
        cuda, hidden = fields.get("torch CUDA"), fields.get("CUDA_VISIBLE_DEVICES")
        why = f"it is built for CUDA {cuda}" if cuda else "it is built without CUDA"
        if hidden is not None:
            why += f", and CUDA_VISIBLE_DEVICES is {hidden!r}"
        found.append(f"The driver has {', '.join(there)}, and torch sees no GPU: {why}.")
    return found


def unknown(why):
    """A race report without a verdict."""
    return {"affected": None, "why": why, "trials": 0, "failed": 0, "errors": {}, "seconds": 0.0}


def race(folder, seconds, fields):
    """Whether compiling in several threads of one process fails here, by trial; adds what was seen to `fields`.

    Each trial is a process of its own, in which three threads start together: one compiles functions with their
    backward, one compiles flex_attention for several masks, and one compiles it once and then goes on calling it, as
    training does while others start up. Before the trials the same threads run one after the other, which must succeed,
    or the failure is not the race.
    """
    if seconds <= 0:
        return unknown("no time was given to a trial")
    start = time.monotonic()
    messages, ending = in_child(lambda send: _trials(send, folder, seconds - 1), seconds, leader=True)
    alone, trials = None, []
    for message in messages:
        fields.update(message.get("fields", {}))
        alone = message.get("alone", alone)
        trials += message.get("trial", [])
    errors = collections.Counter(kind for trial in trials for kind in set(trial))
    failed = sum(1 for trial in trials if trial)
    affected, why = verdict(alone, len(trials), failed, ending)
    return {
        "affected": affected,
        "why": why,
        "trials": len(trials),
        "failed": failed,
        "errors": dict(errors),
        "seconds": round(time.monotonic() - start, 1),
    }


def verdict(alone, trials, failed, ending):
    """(affected: True, False or None, why) of what was seen.

    Args:
        alone: {"errors": kinds, "graphs": number} of the threads one after the other; None if that did not end.
        trials, failed: that ended, and those of them with an error.
        ending: how the process of the trials ended, None if well.
    """
    if alone is None:
        return None, "no trial: {}".format(ending or "torch compiled nothing in time")
    if alone["errors"]:
        return None, "threads one after the other fail as well: {}".format("; ".join(alone["errors"]))
    if not alone["graphs"]:
        return None, "nothing was compiled, though asked for"
    if failed:
        return True, f"{failed} of {trials} trials with three threads failed; one after the other they do not"
    if trials >= FEWEST:
        return False, f"no error in {trials} trials with three threads"
    return None, f"no error, but only {trials} of at least {FEWEST} trials ended in time"


def _trials(send, folder, seconds):
    deadline = time.monotonic() + seconds

    def left():
        return deadline - time.monotonic()

    for name in [name for name in os.environ if name.startswith(SWITCHED_OFF)]:
        del os.environ[name]
    os.environ.update(_caches_in(folder), CUDA_VISIBLE_DEVICES="")
    warnings.simplefilter("ignore")
    import torch
    import torch._dynamo
    import torch.nn.attention.flex_attention

    logging.disable(logging.CRITICAL)
    torch.set_num_threads(1)
    # in processes of their own, so that each trial starts as cold as this
    for observe in (_flag, _config_in_threads, _uncompiled):
        messages, _ = in_child(observe, left())
        for message in messages:
            send(message)
    begin = time.monotonic()
    messages, ending = in_child(lambda send: _threads(send, together=False), left())
    seconds_alone = time.monotonic() - begin
    if left() <= 0:
        return
    alone = messages[0] if messages and not ending else {"errors": [ending], "graphs": 0}
    send({"alone": alone})
    failed = 0
    for _ in range(TRIALS):
        if alone["errors"] or not alone["graphs"] or failed == SETTLED:
            break
        patience = max(20, 5 * seconds_alone)  # beyond it the threads wait for each other
        messages, ending = in_child(lambda send: _threads(send, together=True), min(left(), patience))
        if left() <= 0:
            break
        errors = messages[0]["errors"] if messages else [ending]
        failed += bool(errors)
        send({"trial": [errors]})


def _plain(x):
    import torch

    return (torch.sin(x) * 2 + torch.cos(x)).sum()


def _causal(batch, head, query, key):
    return query >= key


def _attention(x, mask):
    from torch.nn.attention.flex_attention import flex_attention

    return flex_attention(x, x, x, block_mask=mask)


def _threads(send, together):
    """One trial: send the kinds of error and the number of graphs; `together` or one thread after the other."""
    import torch
    from torch._dynamo.utils import counters
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.nn.attention.flex_attention import BlockMask

    # CUDA builds on machines without a GPU crash when the first of these is made outside the main thread, even with
    # one thread at a time; this is not the race, and no machine that trains is like that.
    with FakeTensorMode():
        pass
    plain = torch.compile(_plain, backend="aot_eager", dynamic=False)
    attention = torch.compile(_attention, backend="aot_eager", dynamic=False)
    barrier, running = threading.Barrier(3 if together else 1), [True, True]
    errors: list = []

    def attend(blocks):
        numbers = torch.ones(1, 1, blocks, dtype=torch.int32)
        indices = torch.zeros(1, 1, blocks, blocks, dtype=torch.int32)
        mask = BlockMask.from_kv_blocks(numbers, indices, BLOCK_SIZE=128, mask_mod=_causal)
        attention(torch.ones(1, 1, 128 * blocks, 16), mask)
        return numbers, indices

    def functions():
        for size in range(SHAPES):
            plain(torch.ones(8, 8 + size, requires_grad=True)).backward()

    def masks():
        for blocks in range(2, 2 + SHAPES):
            attend(blocks)

    def steps():
        attend(1)
        while together and any(running) and not errors:
            numbers, indices = attend(1)
            for _ in range(10):
                BlockMask.from_kv_blocks(numbers, indices, BLOCK_SIZE=128, mask_mod=_causal)

    def run(index, role):
        barrier.wait()
        try:
            role()
        except Exception as error:
            errors.append(kind(error))
        finally:
            if index < 2:
                running[index] = False

    threads = [threading.Thread(target=run, args=(i, role)) for i, role in enumerate((functions, masks, steps))]
    for thread in threads:
        thread.start()
        if not together:
            thread.join()
    for thread in threads:
        thread.join()
    send({"errors": sorted(set(errors)), "graphs": counters["stats"]["unique_graphs"]})


def _flag(send):
    """Whether a thread sees that another one traces with FX."""
    import torch

    inside, seen = threading.Event(), threading.Event()

    def traced(x):
        inside.set()
        seen.wait(10)
        return x + 1

    thread = threading.Thread(target=torch.fx.symbolic_trace, args=(traced,))
    thread.start()
    inside.wait(10)
    flag = torch.fx._symbolic_trace.is_fx_tracing()
    seen.set()
    thread.join()
    send({"fields": {"FX tracing flag": "global" if flag else "per thread"}})


def _config_in_threads(send):
    """Whether a setting of torch's config that the main thread makes holds in another thread."""
    import torch._dynamo.config

    seen = []
    torch._dynamo.config.recompile_limit = 12345
    thread = threading.Thread(target=lambda: seen.append(torch._dynamo.config.recompile_limit))
    thread.start()
    thread.join()
    send({"fields": {"dynamo config holds in other threads": seen == [12345]}})


def _uncompiled(send):
    """What flex_attention does when it is called without torch.compile around it."""
    import torch
    from torch._dynamo.utils import counters
    from torch.nn.attention.flex_attention import flex_attention

    operators: Any = importlib.import_module("torch._higher_order_ops.flex_attention")
    original, dense = operators.math_attention, []

    def counting(query, *arguments, **keywords):
        dense.append(type(query) is torch.Tensor)
        return original(query, *arguments, **keywords)

    operators.math_attention = counting
    x = torch.ones(1, 1, 16, 16)
    flex_attention(x, x, x)
    inside = "compiled inside" if counters["stats"]["unique_graphs"] else "not compiled inside"
    send({"fields": {"flex_attention uncompiled": inside + (", dense" if any(dense) else ", not dense")}})


def main():
    """Print the report."""
    # whatever a library prints goes beside the report
    out = os.dup(1)
    os.dup2(2, 1)

    def write(line):
        data = f"\n{line}\n".encode("ascii")
        while data:
            data = data[os.write(out, data) :]

    write(f"{STARTED} {platform.python_version()}")
    sys.path[:] = [folder for folder in sys.path if folder != ""]
    for number in ENDING:
        signal.signal(number, lambda number, frame: sys.exit(128 + number))
    seconds, trial_seconds = [float(argument) for argument in sys.argv[1:]] or (120, 40)
    write(f"{BEGIN} {json.dumps(report(seconds, trial_seconds))} {END}")


if __name__ == "__main__":
    main()
