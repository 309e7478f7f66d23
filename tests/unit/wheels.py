"""Tiny wheels, so that locking and installing are tested offline and in seconds."""

import base64
import contextlib
import functools
import hashlib
import os
import threading
import zipfile
from collections.abc import Iterable, Iterator
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest


def wheel(
    folder: Path, name: str, version: str, files: dict[str, str] | None = None, requires: Iterable[str] = ()
) -> Path:
    """A pure wheel in `folder`, byte-identical for equal arguments; without `files` one empty module."""
    dist_info = f"{name}-{version}.dist-info"
    files = {f"{name}/__init__.py": ""} if files is None else dict(files)
    requirements = "".join(f"Requires-Dist: {requirement}\n" for requirement in requires)
    files[f"{dist_info}/METADATA"] = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n{requirements}"
    files[f"{dist_info}/WHEEL"] = "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    rows = [f"{path},{record_hash(text.encode())},{len(text.encode())}\n" for path, text in files.items()]
    files[f"{dist_info}/RECORD"] = "".join(rows) + f"{dist_info}/RECORD,,\n"
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}-{version}-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for inner, text in files.items():
            archive.writestr(zipfile.ZipInfo(inner, (2020, 1, 1, 0, 0, 0)), text)
    return path


def record_hash(data: bytes) -> str:
    """The digest of a file as RECORD writes it."""
    return "sha256=" + base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()


def torch_wheel(folder: Path, version: str, cuda: str | None, requires: Iterable[str] = ()) -> Path:
    """A torch that has nothing but its version module, as `torch_version` reads it."""
    public, _, local = version.partition("+")
    full = version if local or cuda is None else f"{public}+cu{cuda.replace('.', '')}"
    text = f"__version__ = {full!r}\ncuda: str | None = {cuda!r}\ngit_version = 'stub'\n"
    return wheel(folder, "torch", version, {"torch/__init__.py": "", "torch/version.py": text}, requires)


def index_pages(folder: Path, hashes: bool = True) -> None:
    """The pages of a PEP 503 index (`<package>/index.html`) for the wheels in `folder`, to be served from there."""
    for path in folder.glob("*.whl"):
        page = folder / path.name.split("-")[0].replace("_", "-") / "index.html"
        page.parent.mkdir(exist_ok=True)
        anchor = f"#sha256={hashlib.sha256(path.read_bytes()).hexdigest()}" if hashes else ""
        link = f'<a href="../{path.name.replace("+", "%2B")}{anchor}">{path.name}</a><br>\n'
        with page.open("a") as stream:
            stream.write(link)


@contextlib.contextmanager
def served(folder: Path) -> Iterator[str]:
    """Serve `folder` on the loopback interface; yields the URL."""
    handler = functools.partial(_Quiet, directory=str(folder))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


class _Quiet(SimpleHTTPRequestHandler):
    def end_headers(self) -> None:
        """Nothing that was served may be taken as fresh later."""
        self.send_header("Cache-Control", "max-age=0, must-revalidate")
        super().end_headers()

    def log_message(self, *_: object) -> None:
        """No line per request."""


def isolate(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    """No pip or uv setting of this machine, an empty uv cache in `folder`, no GPU."""
    for name in list(os.environ):
        if name.startswith(("PIP_", "UV_")):
            monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("UV_CACHE_DIR", str(folder / "uv-cache"))
    monkeypatch.setenv("UV_HTTP_RETRIES", "0")
    smi = folder / "bin" / "nvidia-smi"
    smi.parent.mkdir(parents=True)
    smi.write_text("#!/bin/sh\nexit 6\n")
    smi.chmod(0o755)
    monkeypatch.setenv("PATH", f"{smi.parent}:{os.environ['PATH']}")
