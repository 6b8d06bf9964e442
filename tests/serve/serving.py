"""An application without models in worker processes: `python -m tests.serve.serving OPTIONS`.

OPTIONS are JSON: `config` for ServeConfig, `load_seconds`, `load_error`, `fails_again`, `spawn`,
`held_up` at the end, `metrics`, `port`, `open_files`; and `patience`, `hang`, `idle` and `close`
for what else takes seconds.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import resource
import sys
import time
from functools import partial
from pathlib import Path

from enginery.core.errors import ArtifactError
from enginery.serve import server
from enginery.serve.config import ServeConfig
from enginery.serve.http import lifecycle, listener, parent
from enginery.serve.http.lifecycle import Activity
from enginery.serve.http.sockets import bind
from enginery.serve.observability.middleware import ObservabilityMiddleware

log = logging.getLogger("enginery.serve")


async def answer_shutting_down(scope, receive, send):
    from starlette.responses import JSONResponse

    response = JSONResponse({"error": "the server is shutting down."}, 503)
    await response(scope, receive, send)


def application(options, lifecycle):
    """What a worker process runs."""
    activity = Activity()
    metrics = None
    if options.get("metrics"):
        from enginery.serve.observability.metrics import Metrics

        metrics = Metrics()
    app = Application(options, lifecycle, activity, metrics)
    return ObservabilityMiddleware(
        app, activity=activity, shutting_down=answer_shutting_down, metrics=metrics
    )


class Application:
    """Answers with what it was asked; some paths behave badly."""

    def __init__(self, options, lifecycle, activity, metrics):
        self.options, self.lifecycle = options, lifecycle
        self.activity, self.metrics = activity, metrics
        self.ready = False
        self.waiting = set()

    async def __call__(self, scope, receive, send):
        if scope["type"] == "lifespan":
            await self.live(receive, send)
            return
        scope["state"]["record"].route = "/" + scope["path"].split("/")[1]
        status, body = await self.answer(scope["path"], receive)
        headers = [(b"content-length", b"%d" % len(body))]
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": body})

    async def answer(self, path, receive):
        name, _, rest = path.strip("/").partition("/")
        if name == "ready":
            return (200 if self.ready else 503), b""
        if name == "pid":
            return 200, b"%d" % os.getpid()
        if name == "metrics":
            return 200, self.metrics.exposition()[0]
        if name == "modules":
            return 200, " ".join(sys.modules).encode()
        if name == "sleep":
            await asyncio.sleep(float(rest))
        elif name == "wait":
            await asyncio.Event().wait()
        elif name == "body":
            body, more = b"", True
            while more:
                message = await receive()
                body += message.get("body", b"")
                more = message.get("more_body", False)
            return 200, body
        elif name == "kill":
            os.kill(os.getpid(), int(rest))
        elif name == "stuck":
            self.lifecycle.replace("a batch has run for 60 seconds.", self.refuse_all)
            await self.refused()
            return 503, b"the model is stuck."
        elif name == "reload":
            self.lifecycle.reload_all_processes()
        return 200, path.encode()

    async def refused(self):
        waiting = asyncio.get_running_loop().create_future()
        self.waiting.add(waiting)
        await waiting

    def refuse_all(self):
        for each in self.waiting:
            each.set_result(None)

    async def live(self, receive, send):
        await receive()
        self.lifecycle.start(begin_drain=self.drain, reload=self.reload, activity=self.activity)
        loading = asyncio.create_task(self.load())
        await send({"type": "lifespan.startup.complete"})
        await receive()
        loading.cancel()
        log.info("closed")
        if self.options.get("held_up"):
            time.sleep(600)  # as a provider's code may hold up the loop's own thread
        await send({"type": "lifespan.shutdown.complete"})

    async def load(self):
        await asyncio.sleep(self.options.get("load_seconds", 0))
        # A file that the first worker makes.
        again = Path(self.options.get("fails_again", os.devnull))
        fails = again.is_file()
        if not again.exists():
            again.touch()
        if fails or self.options.get("load_error"):
            error = ArtifactError(
                "m: found no manifest.json.", do="Export it with: enginery export"
            )
            self.lifecycle.fail_startup(error)
        self.ready = True

    def drain(self):
        self.ready = False

    async def reload(self):
        log.info("%d: reloaded, content unchanged", os.getpid())


def main():
    options = json.loads(sys.argv[1])
    if options.get("spawn"):
        server.START_METHOD = parent.START_METHOD = "spawn"
    parent.KILL_AFTER_SECONDS = options.get("patience", parent.KILL_AFTER_SECONDS)
    parent.HANG_SECONDS = options.get("hang", parent.HANG_SECONDS)
    lifecycle.CLOSE_SECONDS = options.get("close", lifecycle.CLOSE_SECONDS)
    listener._IDLE_SECONDS = options.get("idle", listener._IDLE_SECONDS)
    if limit := options.get("open_files"):
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))
    config = ServeConfig(port=0, **options.get("config", {}))
    listening = bind("127.0.0.1", options.get("port", 0))
    uvicorn_config = server.uvicorn_config(
        partial(application, options), config, log_config=server.log_config()
    )
    sys.exit(server.run(uvicorn_config, [listening], config))


if __name__ == "__main__":
    main()
