"""Joining a Ray cluster, and what it has room for.

>>> owned = connect(ray, "10.0.0.7:6379")
>>> room_for(ray, cpus=1, gpus=0.5)
8
"""

from __future__ import annotations

import logging
import os
import socket
from typing import Any

from enginery.core.errors import OptionError

_CONNECT_SECONDS = 5.0


def connect(ray: Any, address: str) -> bool:
    """Joins a cluster, or starts a Ray of this run's own.

    Args:
        ray: the package.
        address: `host:port`, `auto`, or empty for what `RAY_ADDRESS` says and else a new one.

    Returns:
        Whether the connection is this run's own to close; one that the caller has stays as it is.

    Raises:
        OptionError: no cluster answers there.
    """
    if ray.is_initialized():
        return False
    address = address or os.environ.get("RAY_ADDRESS", "")
    if address.startswith("ray://"):
        raise OptionError(
            f"ray_address is {address}, which is Ray's client; Ray Data needs a node.",
            do="Run predict on a node of the cluster, or as a Ray job, with --ray-address auto.",
        )
    if ":" in address:
        _require_listener(address)
    if not address:
        # A Ray that is started for one run reports to nobody.
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    logging.getLogger("ray.data").setLevel(logging.WARNING)
    try:
        ray.init(
            address=address or "local",
            include_dashboard=None if address else False,
            log_to_driver=False,
            logging_level=logging.ERROR,
        )
    except Exception as error:  # Ray raises bare Exception where its node does not come up
        raise _unreachable(address, str(error).partition("\n")[0]) from error
    return True


def room_for(ray: Any, cpus: int, gpus: float) -> int:
    """How many actors of so many CPUs and GPUs the cluster has room for.

    Raises:
        OptionError: for none.
    """
    total = ray.cluster_resources()
    rooms = [int(total.get("CPU", 0) // cpus)]
    if gpus:
        rooms.append(int(total.get("GPU", 0) / gpus + 1e-9))
    if min(rooms) < 1:
        raise OptionError(
            f"the Ray cluster has {total.get('CPU', 0):g} CPUs and {total.get('GPU', 0):g} GPUs; "
            f"an actor takes {cpus} and {gpus:g}.",
            do="Change --workers or --ray-gpus.",
        )
    return min(rooms)


def _require_listener(address: str) -> None:
    """Raises OptionError where nobody listens: Ray itself would go on trying for many minutes."""
    host, _, port = address.rpartition(":")
    try:
        with socket.create_connection((host.strip("[]"), int(port)), _CONNECT_SECONDS):
            return
    except (OSError, ValueError, OverflowError) as error:
        raise _unreachable(address, str(error)) from error


def _unreachable(address: str, why: str) -> OptionError:
    return OptionError(
        f"ray_address is '{address or 'local'}', and no Ray answers there: {why.rstrip('.')}.",
        do="Start one with: ray start --head, or name another --ray-address.",
    )
