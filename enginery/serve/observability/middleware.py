from __future__ import annotations
import time
from enginery.serve.observability.record import RequestRecord
class ObservabilityMiddleware:
    def __init__(self, app, **parts):
        self.app = app
        self.count = 0
    async def __call__(self, scope, receive, send):
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        self.count += 1
        state = scope["state"] = dict(scope.get("state") or {})
        given = dict(scope["headers"]).get(b"x-request-id", b"").decode()
        record = state["record"] = RequestRecord(given or f"id-{self.count}", scope["method"], scope["path"], started=time.perf_counter())
        async def send_(message):
            if message["type"] == "http.response.start":
                t = record.timings
                headers = message["headers"] = [*message["headers"], (b"x-request-id", record.request_id.encode())]
                if t is not None and message["status"] == 200:
                    ms = lambda x: f"{x*1e3:.3f}".encode()
                    total = ms(time.perf_counter() - record.started)
                    headers += [(b"x-compute-type", record.compute_type.encode()), (b"x-compute-time", total), (b"x-compute-characters", str(record.characters).encode()), (b"x-compute-tokens", str(t.tokens).encode()), (b"x-total-time", total), (b"x-tokenization-time", ms(t.tokenize_seconds)), (b"x-queue-time", ms(t.queue_seconds)), (b"x-inference-time", ms(t.inference_seconds))]
            await send(message)
        await self.app(scope, receive, send_)
