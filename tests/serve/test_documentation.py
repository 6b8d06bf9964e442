"""Every line of docs/serve.md that asks a server, run by a shell as it is written."""

import json
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from PIL import Image

from enginery.runtime.tasks.audio import example_wav
from enginery.serve.config import ServeConfig
from tests.serve.conftest import Running

DOCUMENT = Path(__file__).parents[2] / "docs/serve.md"
# The document's names of models, and the tiny ones that stand for them.
MODELS = {
    "minilm": "vectors",
    "mood": "mood",
    "reader": "reader",
    "photos": "photos",
    "ranker": "ranker",
    "calls": "calls",
    "writer": "writer",
}


def commands(program):
    """The commands of the console blocks that call a program, with the lines that they go on in."""
    found = []
    for block in re.findall(r"```console\n(.*?)```", DOCUMENT.read_text(), re.DOTALL):
        for prompt in re.split(r"^\$ ", block, flags=re.MULTILINE)[1:]:
            lines = prompt.splitlines()
            command = lines.pop(0)
            while lines and (command.endswith("\\") or command.count("'") % 2):
                command += f"\n{lines.pop(0)}"
            if command.startswith(program):
                found.append(command)
    return found


# Speech needs Whisper, whose routes are asked in test_speech.py.
CURLS = [command for command in commands("curl") if "/v1/audio/" not in command]


@pytest.fixture(scope="module")
def served(tiny_paths):
    paths = tiny_paths(*MODELS.values())
    with Running(
        {name: paths[tiny] for name, tiny in MODELS.items()}, ServeConfig(access_log="off")
    ) as server:
        yield server


def test_commands_name_the_models_of_the_documented_server():
    server = max(commands("enginery serve"), key=len)
    assert set(re.findall(r"(\w+)=", server)) == set(MODELS)
    assert len(CURLS) == 12


@pytest.mark.skipif(not shutil.which("curl"), reason="curl is not installed")
@pytest.mark.parametrize("command", CURLS)
def test_curl_is_answered(served, tmp_path, command):
    # What is typed stays as it is: curl's own settings say where the server is.
    settings = (
        f'connect-to = "localhost:8000:127.0.0.1:{served.port}"\nfail-with-body\nno-progress-meter'
    )
    (tmp_path / ".curlrc").write_text(settings)
    for name in ("cat", "boat"):
        Image.effect_noise((48, 40), 90).convert("RGB").save(tmp_path / f"{name}.png")
    (tmp_path / "call.wav").write_bytes(example_wav())
    done = subprocess.run(
        command,
        shell=True,
        cwd=tmp_path,
        capture_output=True,
        timeout=60,
        check=False,
        env={**os.environ, "CURL_HOME": str(tmp_path)},
    )
    assert done.returncode == 0, (done.stdout, done.stderr)
    assert json.loads(done.stdout)
