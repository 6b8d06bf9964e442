"""Connect to a Ray cluster and count the actors that fit into it.

owned = connect(ray, "10.0.0.7:6379")
max_actors(ray, cpus=1, gpus=0.5)  # 8
"""

from __future__ import annotations

import logging
import os
import socket
from typing import Any

from enginery.core.errors import OptionError

_CONNECT_SECONDS = 5.0


def connect(ray: Any, address: str) -> bool:
    """Connect to a cluster, or start a local Ray for this run.

    Args:
        ray: the package.
        address: `host:port`, `auto`, or empty for `RAY_ADDRESS`, or a local Ray if it is not set.

    Returns:
        True if this run has to close the connection; False if it existed before.

    Raises:
        OptionError: no cluster answers at the address.
    """
    if ray.is_initialized():
        return False
    address = address or os.environ.get("RAY_ADDRESS", "")
    if address.startswith("ray://"):
        raise OptionError(
            f"option 'ray_address' is {address}, an address for Ray Client, but Ray Data needs to "
            "run on a node.",
            do="Run predict on a node of the cluster, or as a Ray job, with --ray-address auto.",
        )
    if ":" in address:
        _check_listener(address)
    if not address:
        # A Ray that is started for one run sends no usage statistics.
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    logging.getLogger("ray.data").setLevel(logging.WARNING)
    try:
        ray.init(
            address=address or "local",
            include_dashboard=None if address else False,
            log_to_driver=False,
            logging_level=logging.ERROR,
        )
    except Exception as error:  # Ray raises a bare Exception if its node does not start
        raise _unreachable_error(address, str(error).partition("\n")[0]) from error
    return True


def max_actors(ray: Any, cpus: int, gpus: float) -> int:
    """Return the number of actors with these resources that fit into the cluster, at least 1.

    Raises:
        OptionError: no actor fits.
    """
    total = ray.cluster_resources()
    limits = [int(total.get("CPU", 0) // cpus)]
    if gpus:
        limits.append(int(total.get("GPU", 0) / gpus + 1e-9))
    if min(limits) < 1:
        raise OptionError(
            f"the Ray cluster has {total.get('CPU', 0):g} CPUs and {total.get('GPU', 0):g} GPUs, "
            f"but an actor needs {cpus} CPUs and {gpus:g} GPUs.",
            do="Change --workers or --ray-gpus.",
        )
    return min(limits)


def _check_listener(address: str) -> None:
    """Raise OptionError if no server listens: Ray itself would retry for many minutes."""
    host, _, port = address.rpartition(":")
    try:
        with socket.create_connection((host.strip("[]"), int(port)), _CONNECT_SECONDS):
            return
    except (OSError, ValueError, OverflowError) as error:
        raise _unreachable_error(address, str(error)) from error


def _unreachable_error(address: str, reason: str) -> OptionError:
    return OptionError(
        f"option 'ray_address' is '{address or 'local'}', but no Ray cluster answers there: "
        f"{reason.rstrip('.')}.",
        do="Start one with: ray start --head. Or change --ray-address.",
    )
