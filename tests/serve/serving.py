"""A server of echoes in a process of its own: `python -m tests.serve.serving OPTIONS`.

OPTIONS are JSON: `config` for ServeConfig, `restart`, `load_seconds`, `load_error`.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys

from enginery.core.errors import ArtifactError
from enginery.serve.config import ServeConfig
from enginery.serve.http_sockets import bind
from enginery.serve.supervisor import supervise


def say(line):
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def service(life, options):
    from enginery.serve.messages import Response
    from tests.serve.echo import Echo

    class Application(Echo):
        ready = False

        async def answer(self, request):
            name, _, rest = request.path.strip("/").partition("/")
            if name == "ready":
                return Response(200 if self.ready else 503)
            if name == "about":
                return Response.of_json(
                    {"pid": os.getpid(), "restarts": life.restarts.count,
                     "reason": life.restarts.reason}
                )  # fmt: skip
            if name == "kill":
                os.kill(os.getpid(), int(rest))
            if name == "stuck":
                life.restart("a batch has run for 60 seconds.")
                await self.gate.wait()
            return await super().answer(request)

    class Service:
        def __init__(self):
            self.application = Application()

        async def load(self):
            await asyncio.sleep(options.get("load_seconds", 0))
            if options.get("load_error"):
                raise ArtifactError(
                    "m: found no manifest.json.", do="Export it with: enginery export"
                )
            self.application.ready = True

        def drain(self):
            self.application.ready = False

        async def reload(self):
            return ["m: reloaded, of the same content"]

        async def close(self):
            say("closed")

    return Service()


def main():
    options = json.loads(sys.argv[1])
    config = ServeConfig(port=0, **options.get("config", {}))
    sockets = bind("127.0.0.1", 0)
    say(f"{os.getpid()} {sockets[0].getsockname()[1]}")

    def serve(restarts):
        from enginery.serve.server import run

        return run(lambda life: service(life, options), sockets, config, restarts=restarts, say=say)

    status = supervise(
        serve, sockets, restart=options.get("restart", True), say=say,
        patience_seconds=options.get("patience", 60),
    )  # fmt: skip
    # A child that failed to notice this would hang in the test.
    signal.alarm(30)
    sys.exit(status)


if __name__ == "__main__":
    main()
