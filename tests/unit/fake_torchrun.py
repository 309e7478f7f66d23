"""In the place of torch.distributed.run and of the workers: processes that train nothing, but meet, stop and die alike.

WORKER=refuse:1    the worker of rank 1 refuses
WORKER=hang:1      the worker of rank 1 never stops, as one that waits for a rank that is gone
    WORKER=lose:0      the worker of rank 0 fails once that of rank 3 is gone, whose torchrun is slow to notice
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

DEATH = """Root Cause (first observed failure):
[0]:
  time      : 2026-01-01_00:00:00
  rank      : {rank} (local_rank: {rank})
  exitcode  : {status} (pid: {process})
"""


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--nproc-per-node", type=int)
    parser.add_argument("--exchange", type=Path)
    parser.add_argument("--on-node", type=int)
    return parser.parse_known_args()[0]


def main() -> None:
    given, ended, failed = arguments(), [], []
    command = [sys.executable, __file__, *sys.argv[1:]]
    workers = [
        subprocess.Popen(command, env={**os.environ, "LOCAL_RANK": str(place)}, start_new_session=True)
        for place in range(given.nproc_per_node)
    ]

    def wait(rank, process):
        if process.wait():
            failed.append((rank, process))

    for worker in enumerate(workers):
        threading.Thread(target=wait, args=worker, daemon=True).start()

    def end(*_):
        ended.append(time.monotonic())
        for process in workers:
            process.terminate()

    signal.signal(signal.SIGTERM, end)
    slow = os.environ.get("WORKER", "").startswith("lose") and given.on_node == 1
    while any(process.poll() is None for process in workers):
        time.sleep(0.4 if slow else 0.05)
        if failed and not ended:
            rank, process = failed[0]
            print(DEATH.format(rank=rank, status=process.returncode, process=process.pid), file=sys.stderr)
            end()
        if ended and time.monotonic() - ended[0] > 30:  # torchrun's own patience
            for process in workers:
                process.kill()
    sys.exit(1 if any(process.returncode for process in workers) else 0)


def gone(file: Path) -> bool:
    """Whether the process of a pid file has ended; its parent may not have noticed."""
    if not file.exists():
        return False
    stat = Path(f"/proc/{file.read_text()}/stat")
    return not stat.exists() or stat.read_text().rpartition(")")[2].split()[0] == "Z"


def work() -> None:
    given, place = arguments(), int(os.environ["LOCAL_RANK"])
    rank = given.on_node * given.nproc_per_node + place
    what, _, whom = os.environ.get("WORKER", "").partition(":")
    chosen = whom == str(rank)
    if what == "refuse" and chosen:
        told = {
            "what": "This is not what was fingerprinted: driver 580 -> 570.",
            "remedy": "Restore it.",
            "where": None,
        }
        (given.exchange / f"{rank}.error").write_text(json.dumps(told))
        os._exit(1)
    agreed = given.exchange / "agreed"
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
        signal.signal(number, (lambda *_: None) if what == "hang" and chosen else (lambda *_: agreed.touch()))
    (given.exchange / f".{rank}").write_text(str(os.getpid()))
    (given.exchange / f".{rank}").rename(given.exchange / f"{rank}.pid")
    (given.exchange / f"{rank}.stepped").touch()
    while not agreed.exists() or (what == "hang" and chosen):
        time.sleep(0.05)
        if what == "lose" and chosen and gone(given.exchange / "3.pid"):
            (given.exchange / f"{rank}.error").write_text(json.dumps({"traceback": "Connection closed by peer"}))
            os._exit(1)
    if rank == 0:
        (given.exchange / "outcome.json").write_text(json.dumps({"finished": False, "step": 7}))


if __name__ == "__main__":
    work() if "LOCAL_RANK" in os.environ else main()
