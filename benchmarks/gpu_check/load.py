"""Send requests to a server from one process, as many at a time as there are connections.

    $ python -m benchmarks.gpu_check.load 8000 16 5.0
    {"answered": 41210, "refused": 0, "failed": 0, "latency_ms": {"p50": 1.9, "p99": 3.4}}

Each connection sends its next request after a response (a closed loop).
"""

from __future__ import annotations

import asyncio
import json
import sys
import time

from benchmarks.gpu_check.inputs import sentences


async def connection(port: int, until: float, first: int, found: dict[int, list[float]]) -> None:
    """Send sentences until the time is over; add each latency in ms to those of its status."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    texts = sentences()
    index = first
    while time.perf_counter() < until:
        body = json.dumps({"inputs": texts[index % len(texts)]}).encode()
        began = time.perf_counter()
        writer.write(
            b"POST /embed HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: application/json\r\n"
            b"content-length: %d\r\n\r\n" % len(body)
        )
        writer.write(body)
        head = await reader.readuntil(b"\r\n\r\n")
        length = head.lower().partition(b"content-length:")[2].partition(b"\r\n")[0]
        await reader.readexactly(int(length))
        found.setdefault(int(head[9:12]), []).append((time.perf_counter() - began) * 1e3)
        index += 1
    writer.close()


async def run(port: int, connections: int, seconds: float) -> dict[str, object]:
    """Return the number of responses, and percentiles of the latency of those with status 200."""
    found: dict[int, list[float]] = {}
    sentences()  # read before the time begins
    until = time.perf_counter() + seconds
    tasks = [connection(port, until, 37 * index, found) for index in range(connections)]
    ended = await asyncio.gather(*tasks, return_exceptions=True)
    times = sorted(found.get(200, []))
    at = {f"p{share}": times[len(times) * share // 100] for share in (50, 99)} if times else {}
    return {
        "answered": len(times),
        "refused": sum(len(values) for status, values in found.items() if status != 200),
        "failed": sum(isinstance(one, BaseException) for one in ended),
        "latency_ms": at,
    }


if __name__ == "__main__":
    given = sys.argv[1:]
    print(json.dumps(asyncio.run(run(int(given[0]), int(given[1]), float(given[2])))))
