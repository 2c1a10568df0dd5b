"""A model and a dataset by their hub ids: the ranks of a node download each file once, into the cache they share."""

import hashlib
import json
import time
from collections import Counter
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Lock, Thread
from typing import Any

import pytest

from tests.two_nodes import steps, two_agents, write_config
from tests.world import run_script

pytestmark = pytest.mark.slow

MODEL, DATA = "drophammer/tiny", "drophammer/additions"
COMMIT = "0123456789abcdef0123456789abcdef01234567"
SLOW_S = 3.0  # that weights and rows take to arrive, so that ranks which all wanted them would all ask before the first has them
SLOW = ("model.safetensors", "train.jsonl")


class Hub(ThreadingHTTPServer):
    """As much of the hub as huggingface_hub asks for, with one model and one dataset; counts the files that were fetched."""

    daemon_threads = True

    def __init__(self, model: Path, data: Path):
        super().__init__(("127.0.0.1", 0), Answer)
        self.repos = {f"models/{MODEL}": model, f"datasets/{DATA}": data}
        self.fetched, self._lock = Counter[str](), Lock()

    def note(self, file: str) -> None:
        with self._lock:
            self.fetched[file] += 1

    @property
    def files(self) -> list[str]:
        return [path.name for folder in self.repos.values() for path in folder.iterdir()]

    @property
    def environment(self) -> dict[str, str]:
        own = {"HF_ENDPOINT": f"http://127.0.0.1:{self.server_port}", "HF_HUB_OFFLINE": "0", "TRANSFORMERS_OFFLINE": "0"}
        return own | {"NO_PROXY": "127.0.0.1", "no_proxy": "127.0.0.1", "HF_HUB_DISABLE_TELEMETRY": "1"}


class Answer(BaseHTTPRequestHandler):
    """/api/KIND/OWNER/NAME[/WHAT/REVISION[/PATH]], or a file at [/datasets]/OWNER/NAME/resolve/REVISION/PATH."""

    protocol_version = "HTTP/1.1"
    server: Hub

    def do_GET(self) -> None:
        asked = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        kind, *words = self.path.partition("?")[0].strip("/").removeprefix("api/").split("/")
        if kind not in ("models", "datasets"):
            kind, words = "models", [kind, *words]
        owner, name, what, _, *rest = [*words, "", "", "", ""]
        path, folder = "/".join(filter(None, rest)), self.server.repos.get(f"{kind}/{owner}/{name}")
        if folder is None:
            self.reply(404, {}, {"X-Error-Code": "RepoNotFound"})
        elif what == "resolve" and (file := folder / path).is_file():
            self.send_file(file)
        elif what == "resolve" or (what == "tree" and path):  # there are no folders
            self.reply(404, {}, {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": COMMIT})
        else:
            files = [{"type": "file", "path": p.name, "size": p.stat().st_size, "oid": digest(p)} for p in folder.iterdir()]
            if what == "paths-info":
                self.reply(200, [file for file in files if str(file["path"]).encode() in asked])
            elif what == "tree":
                self.reply(200, files)
            else:
                siblings = [{"rfilename": file["path"]} for file in files]
                self.reply(200, {"id": f"{owner}/{name}", "sha": COMMIT, "siblings": siblings, "tags": []})

    do_HEAD = do_POST = do_GET

    def send_file(self, file: Path) -> None:
        if self.command == "GET":
            self.server.note(file.name)
            time.sleep(SLOW_S if file.name in SLOW else 0)
        self.reply(200, file.read_bytes(), {"ETag": f'"{digest(file)}"', "X-Repo-Commit": COMMIT})

    def reply(self, status: int, content: Any, headers: dict[str, str] | None = None) -> None:
        body = content if isinstance(content, bytes) else json.dumps(content).encode()
        self.send_response(status)
        for key, value in ({"Content-Length": str(len(body)), "Content-Type": "application/json"} | (headers or {})).items():
            self.send_header(key, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        pass


def digest(file: Path) -> str:
    return hashlib.sha1(file.read_bytes()).hexdigest()


@pytest.fixture
def hub(tiny_qwen3, additions) -> Iterator[Hub]:
    with Hub(tiny_qwen3, additions.parent) as server:
        thread = Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def test_the_ranks_of_a_node_download_each_file_once_for_policy_reference_and_engine(hub, tmp_path):
    env = hub.environment | {"HF_HOME": str(tmp_path / "cache")}
    run_script(2, "train_grpo.py", str(write_config(tmp_path, "run", MODEL, DATA)), "training.steps=1", env=env)
    assert len(steps(tmp_path / "run")) == 1
    assert hub.fetched == dict.fromkeys(hub.files, 1)


def test_each_of_two_nodes_downloads_each_file_once(hub, tmp_path):
    """Two nodes of two ranks, each with a cache of its own."""
    config = tmp_path / "sft.yaml"
    training = {"steps": 1, "batch_size": 8, "seq_len": 24, "dtype": "float32"}
    run = {"model": f"hf://{MODEL}@main", "dataset": {"path": DATA}, "training": training, "device": "cpu", "output": str(tmp_path / "sft")}
    config.write_text(json.dumps(run))
    first, second = (hub.environment | {"HF_HOME": str(tmp_path / f"cache{node}")} for node in (0, 1))
    codes, output = two_agents("train_sft.py", config, nproc=2, env=(first, second))
    assert codes == [0, 0], output
    assert len(steps(tmp_path / "sft")) == 1
    assert hub.fetched == dict.fromkeys(hub.files, 2)
