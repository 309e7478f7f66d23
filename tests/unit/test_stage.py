import errno
import json

import pytest

from draftflow.errors import DraftflowError
from draftflow.stage import Record, run_stage, write_json


class SafetensorError(Exception):
    """As safetensors raises it: the system's error is only in the text."""


def failing(error):
    def main():
        raise error

    return main


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (DraftflowError("It is wrong.", "Mend it.", "a.json:3"), "draftflow: error: a.json:3: It is wrong. Mend it."),
        (OSError(errno.ENOSPC, "No space left on device", "/data/x"), "draftflow: error: /data/x: No space left"),
        (OSError(errno.EROFS, "Read-only file system", "/data/x"), "draftflow: error: /data/x: Read-only file system."),
        (SafetensorError("I/O error: No space (os error 28)"), "draftflow: error: No space left on device."),
    ],
)
def test_a_refusal_is_one_line_and_status_1(error, line, capsys):
    with pytest.raises(SystemExit) as caught:
        run_stage(failing(error))
    assert caught.value.code == 1
    said = capsys.readouterr().err
    assert said.startswith(line)
    assert said.count("\n") == 1


@pytest.mark.parametrize("error", [ValueError("ours"), OSError(errno.EIO, "I/O error"), SafetensorError("header")])
def test_a_fault_of_ours_keeps_its_traceback(error):
    with pytest.raises(type(error)):
        run_stage(failing(error))


def test_a_record_adds_up_the_seconds_of_a_part(tmp_path):
    record = Record("test", fact=1)
    for _ in range(2):
        with record.part("work"):
            pass
    record.write(tmp_path / "folder/record.json")
    written = json.loads((tmp_path / "folder/record.json").read_text())
    assert written["stage"] == "test"
    assert written["fact"] == 1
    assert written["seconds"]["total"] >= written["seconds"]["work"] >= 0


def test_a_file_that_cannot_be_written_leaves_the_old_one(tmp_path):
    path = tmp_path / "value.json"
    write_json(path, 1)
    with pytest.raises(TypeError):
        write_json(path, object())
    assert path.read_text() == "1\n"
    assert list(tmp_path.iterdir()) == [path]
