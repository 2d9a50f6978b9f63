"""A small corpus in two languages, and a server of files, for the tests of the data floor."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from attnbench.data.corpus import Data
from attnbench.data.prepare import prepare
from attnbench.data.recipe import Recipe


@pytest.fixture(scope="session")
def demo_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    recipe = Recipe.model_validate({"dataset": {"kind": "demo", "pairs": 700, "held_out": 60}})
    return prepare(recipe, cache=tmp_path_factory.mktemp("cache"))


@pytest.fixture(scope="session")
def demo(demo_path: Path) -> Data:
    return Data.open(demo_path)


class Server:
    """Serves a folder on this machine; `asked` lists the paths of all requests."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.asked: list[str] = []
        asked = self.asked

        class Handler(SimpleHTTPRequestHandler):
            def do_GET(self) -> None:
                asked.append(self.path)
                if self.path.startswith("/cut/"):  # says more than it sends
                    data = (folder / Path(self.path).name).read_bytes()
                    self.send_response(200)
                    self.send_header("Content-Length", str(len(data)))
                    self.end_headers()
                    self.wfile.write(data[: len(data) // 2])
                else:
                    super().do_GET()

            def log_message(self, *args: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Handler, directory=str(folder)))
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}/"
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    monkeypatch.setattr("attnbench.data.download.PAUSE", 0.0)
    folder = tmp_path / "served"
    folder.mkdir()
    server = Server(folder)
    yield server
    server.close()
