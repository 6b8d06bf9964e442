"""What a publish to MLflow that was killed has left, and whether its writer is gone.

Takes MLflow's own client and a package; marks a logged model that nobody writes as ours.

    >>> find_begun(MlflowClient(), "1", package, "minilm")
    (<LoggedModel: …>, '4f0c…')

A run names the machine and the process that write it. It is taken over where it has ended, or where
its process was one of this machine and is no more; of another machine's nobody can tell.
"""

from __future__ import annotations

import os
import socket
import sys
from typing import Any

from enginery.publish.package import Package
from enginery.publish.targets.mlflow.model import CONTENT_TAG

MODEL_TAG = "enginery.registered_model"
"""The registered model that a logged model is for: one content may go to several."""
WRITER_TAG = "enginery.writer"
LOGGED_TAG = "enginery.logged_model"
"""Of a version: the id of the logged model that it points to."""
_UNREGISTERED = ("PENDING", "READY")
_ENDED = ("FINISHED", "FAILED", "KILLED")


def find_begun(
    client: Any, experiment_id: str, package: Package, name: str
) -> tuple[Any, str] | None:
    """The logged model of this content and name that a dead writer has left, and its run.

    It is PENDING where files may be missing, READY where it was to be registered next. Whoever
    calls has found no version of this content.
    """
    wanted = f"tags.`{CONTENT_TAG}` = '{package.content_sha256}' AND tags.`{MODEL_TAG}` = '{name}'"
    for model in client.search_logged_models([experiment_id], filter_string=wanted):
        if str(model.status) not in _UNREGISTERED or not model.source_run_id:
            continue
        run = client.get_run(model.source_run_id)
        if run.info.status in _ENDED or _is_gone(run.data.tags.get(WRITER_TAG, "")):
            client.set_tag(run.info.run_id, WRITER_TAG, writer())
            client.update_run(run.info.run_id, status="RUNNING")
            return model, str(run.info.run_id)
    return None


def writer() -> str:
    """The process that runs: `host/4711`."""
    return f"{socket.gethostname()}/{os.getpid()}"


def _is_gone(named: str) -> bool:
    """Whether a writer was a process of this machine and is none any more."""
    host, _, number = named.rpartition("/")
    if host != socket.gethostname() or not number.isdecimal() or sys.platform == "win32":
        return False
    if int(number) == os.getpid():
        return True  # under the lock of this content, this process writes nothing else
    try:
        os.kill(int(number), 0)
    except ProcessLookupError:
        return True
    except OSError:  # somebody else's
        return False
    return False
