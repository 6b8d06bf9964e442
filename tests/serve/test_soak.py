"""Ten minutes at twice what the server can do: every request is answered, rightly and in time.

`pytest -s` prints the capacity, the shares of the answers and how long those with status 200 took.
"""

import asyncio
import math
import os
import random
import time
from collections import Counter
from pathlib import Path

import numpy as np
import orjson
import pytest
from prometheus_client.parser import text_string_to_metric_families

from enginery.runtime.model import load_model
from tests.serve.test_service import serving

SECONDS = float(os.environ.get("SOAK_SECONDS", "600"))
CAPACITY_SECONDS = 8
TEXTS = 400
MAX_WAIT_SECONDS = 2
IDLE_SECONDS = 30
MOST_RUNNING = 1000
"""Beyond it this process is what is too slow, and no request is due."""


class Client:
    """Plain HTTP/1.1 over a pool of connections: it must not take the server's cores."""

    def __init__(self, url):
        host, port = url.removeprefix("http://").split(":")
        self._address = host, int(port)
        self._free = []

    async def embed(self, text):
        """Status, head and body."""
        reader, writer = await self._connection()
        body = orjson.dumps({"inputs": text})
        writer.write(b"POST /embed HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % len(body))
        writer.write(body)
        head = await reader.readuntil(b"\r\n\r\n")
        length = int(head.lower().partition(b"content-length: ")[2].split(b"\r\n")[0])
        found = await reader.readexactly(length)
        self._free.append((time.monotonic(), reader, writer))
        return int(head.split(b" ", 2)[1]), head, found

    async def _connection(self):
        while self._free:
            since, reader, writer = self._free.pop()
            if time.monotonic() - since < IDLE_SECONDS:
                return reader, writer
            writer.close()  # the server ends idle connections, and may do so right now
        return await asyncio.open_connection(*self._address)

    async def close(self):
        for *_, writer in self._free:
            writer.close()
            await writer.wait_closed()


def resident_bytes(pid):
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
        if line.startswith("Rss:"):
            return int(line.split()[1]) * 1024
    raise AssertionError("the process is gone")


def phrases():
    chance = random.Random(0)
    words = ["the", "pump", "valve", "engine", "runs", "warm", "open", "again", "of", "a", "key"]
    lengths = [chance.randint(1, 40) for _ in range(TEXTS)]
    return [" ".join(chance.choice(words) for _ in range(length)) for length in lengths]


class Soak:
    """Asks for known texts, and counts what comes back."""

    def __init__(self, url, texts, expected):
        self._texts, self._expected = texts, expected
        self._client, self._chance = Client(url), random.Random(1)
        self.sent, self.statuses = 0, Counter()
        self.wrong, self.memory, self.seconds = [], [], []

    async def ask(self):
        place = self._chance.randrange(TEXTS)
        self.sent += 1
        began = time.monotonic()
        status, head, body = await self._client.embed(self._texts[place])
        self.statuses[status] += 1
        if status == 200:
            self.seconds.append(time.monotonic() - began)
            found = np.asarray(orjson.loads(body)[0], np.float32)
            if not np.allclose(found, self._expected[place], atol=1e-4):
                self.wrong.append(place)
        else:
            assert b"retry-after: " in head.lower()

    async def capacity(self):
        """Requests a second that 32 clients get answered, each after another."""
        until = time.monotonic() + CAPACITY_SECONDS

        async def client():
            while time.monotonic() < until:
                await self.ask()

        await asyncio.gather(*(client() for _ in range(32)))
        assert set(self.statuses) == {200}
        return self.statuses.total() / CAPACITY_SECONDS

    async def run(self, pid):
        """Requests come twice as fast, whether those before them were answered or not."""
        rate, running = 2 * await self.capacity(), set()
        print(f"\n{rate:.0f} requests a second")  # noqa: T201
        self.seconds.clear()
        due = look = time.monotonic()
        ends = due + SECONDS
        while due < ends:
            due += self._chance.expovariate(rate)
            await asyncio.sleep(max(due - time.monotonic(), 0))
            if len(running) >= MOST_RUNNING:
                due = time.monotonic()
                continue
            task = asyncio.create_task(self.ask())
            running.add(task)
            task.add_done_callback(running.discard)
            if due > look:
                self.memory.append(resident_bytes(pid))
                look += 5
        await asyncio.gather(*running)
        await self._client.close()


def share_in_queue_below(metrics, seconds):
    """Share of the requests that waited no longer for a worker, as the server has measured."""
    found = {}
    for family in text_string_to_metric_families(metrics):
        for sample in family.samples:
            if sample.name == "enginery_queue_seconds_bucket":
                found[float(sample.labels["le"])] = sample.value
    return found[seconds] / found[math.inf]


@pytest.mark.slow
def test_ten_minutes_at_twice_the_capacity(minilm):
    from enginery import export_model

    artifact, texts = export_model(minilm), phrases()
    with load_model(artifact) as model:
        expected = model.embed(texts)
    options = ("--access-log", "off", "--max-wait", str(MAX_WAIT_SECONDS))
    with serving(artifact.path, options=options) as server:
        soak = Soak(server.url, texts, expected)
        asyncio.run(soak.run(server.child))
        in_time = share_in_queue_below(server.client.get("/metrics").text, 1.25 * MAX_WAIT_SECONDS)
        shares = ", ".join(f"{n:,} × {status}" for status, n in soak.statuses.items())
        took = ", ".join(f"{s:.2f} s" for s in np.quantile(soak.seconds, [0.5, 0.99, 1]))
        print(f"{shares}; median, p99, most: {took}; {in_time:.2%} in time")  # noqa: T201
        assert set(soak.statuses) == {200, 429}
        assert in_time > 0.99
        assert soak.statuses.total() == soak.sent
        assert soak.statuses[429] > 0.1 * soak.sent
        assert not soak.wrong
        memory = soak.memory
        settled = max(memory[len(memory) // 5 : 2 * len(memory) // 5])
        assert max(memory) <= settled * 1.05 + 8e6
        assert server.client.get("/health/ready").status_code == 200
        (served,) = server.client.get("/info").json()["models"]
        assert (served["queue"]["inputs"], served["queue"]["tokens"]) == (0, 0)
        assert not any("error" in line.lower() for line in server.lines)
