"""Where enginery keeps what it makes: `$ENGINERY_HOME`, or the platform's cache directory."""

from __future__ import annotations

import os
from pathlib import Path

from platformdirs import user_cache_path


def enginery_home() -> Path:
    """The directory; it may not exist yet."""
    named = os.environ.get("ENGINERY_HOME", "")
    return Path(named).expanduser() if named else user_cache_path("enginery")
