"""Each case runs in a process of its own: an audit hook cannot be removed."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import json, sys
from pathlib import Path
from enginery.core.trust.confinement import confined
from enginery.core.errors import UntrustedModelError
model, out, code = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]
hide = len(sys.argv) > 4
import ctypes, os, pickle, socket, sqlite3, subprocess, tempfile, shutil, importlib.util
try:
    with confined(model, writable=[out]):
        try:
            exec(code)
        except Exception:
            if not hide:
                raise
    print(json.dumps("done"))
except UntrustedModelError as error:
    print(json.dumps(error.message))
except Exception as error:
    print(json.dumps(f"{type(error).__name__}: {error}"))
"""


@pytest.fixture
def place(tmp_path):
    """A model, a place for results, and a home that is nobody's business, on no temporary disk."""
    for name in ("model", "out", "home", "tmp"):
        (tmp_path / name).mkdir()
    (tmp_path / "home/secret.txt").write_text("secret")
    (tmp_path / "model/config.json").write_text("{}")
    marker = tmp_path / "out/ran"
    (tmp_path / "model/evil.py").write_text(f"open({str(marker)!r}, 'w').write('ran')")
    (tmp_path / "model/link").symlink_to(tmp_path / "home/secret.txt")
    (tmp_path / "model/pytorch_model.bin").symlink_to(tmp_path / "weights")
    (tmp_path / "weights").write_text("")
    return tmp_path


def run(place, code, *more):
    root = str(Path(__file__).parents[3])
    environment = {**os.environ, "PYTHONPATH": root, "TMPDIR": str(place / "tmp")}
    found = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(place / "model"), str(place / "out"), code, *more],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        cwd=place,
    )
    assert found.returncode == 0, found.stderr
    assert not (place / "out/ran").exists()
    return json.loads(found.stdout)


STOPPED = {
    "import from a path": (
        "spec = importlib.util.spec_from_file_location('evil', model / 'evil.py');"
        "spec.loader.exec_module(importlib.util.module_from_spec(spec))",
        "to run .*evil",
    ),
    "import by sys.path": (
        "import sys; sys.path.insert(0, str(model)); import evil",
        "to run .*evil",
    ),
    "reading and running": ("exec((model / 'evil.py').read_text())", "to run .*evil"),
    "compile": ("compile('1', str(model / 'evil.py'), 'exec')", "to run .*evil"),
    "code in the temporary directory": (
        "p = Path(tempfile.mkdtemp()) / 'e.py'; p.write_text('1');"
        "spec = importlib.util.spec_from_file_location('e', p);"
        "spec.loader.exec_module(importlib.util.module_from_spec(spec))",
        r"to run .*e\.(cpython.*)?py",
    ),
    "name in brackets": (
        "(out / '<e>.py').write_text('1'); os.chdir(out);"
        "spec = importlib.util.spec_from_file_location('e', '<e>.py');"
        "spec.loader.exec_module(importlib.util.module_from_spec(spec))",
        r"to run .*<e>\.(cpython.*)?py",
    ),
    "library": ("ctypes.CDLL(str(model / 'evil.so'))", "to run .*evil.so"),
    "process": ("subprocess.run(['id'])", "to start a process"),
    "shell": ("os.system('id')", "to start a process"),
    "fork": ("os.fork()", "to start a process"),
    "exec": ("os.execv('/bin/true', ['true'])", "to start a process"),
    "spawn": ("os.posix_spawn('/bin/true', ['true'], {})", "to start a process"),
    "connection": ("socket.create_connection(('127.0.0.1', 9))", "to open a connection"),
    "name": ("socket.gethostbyname('localhost')", "to open a connection"),
    "server": ("socket.socket().bind(('127.0.0.1', 0))", "to open a connection"),
    "pickle": ("pickle.loads(b'cos\\nsystem\\n.')", "to load an object from a pickle"),
    "pickle by way of a tokenizer's part": (
        "import tokenizers.decoders;"
        "pickle.loads(b'\\x80\\x04\\x8c\\x13tokenizers.decoders\\x8c\\x0fFuse.__module__\\x93.')",
        "to load an object from a pickle",
    ),
    "write": ("(model.parent / 'home/new').write_text('')", "to write .*home/new"),
    "append": ("open(model.parent / 'home/secret.txt', 'a')", "to write .*secret.txt"),
    "low level": (
        "os.open(model.parent / 'home/new', os.O_CREAT | os.O_WRONLY)",
        "to write .*home/new",
    ),
    "write into the model": ("(model / 'config.json').write_text('')", "to write .*config.json"),
    "write through a link": ("open(model / 'link', 'w')", "to write .*secret.txt"),
    "remove": ("os.remove(model.parent / 'home/secret.txt')", "to change .*secret.txt"),
    "rename": (
        "os.rename(model.parent / 'home/secret.txt', out / 'x')",
        "to change .*secret.txt",
    ),
    "remove by handle": (
        "h = os.open(out, os.O_RDONLY); os.remove('../home/secret.txt', dir_fd=h)",
        "to change .*secret.txt",
    ),
    "mode": ("os.chmod(model.parent / 'home/secret.txt', 0o777)", "to change .*secret.txt"),
    "link": ("os.symlink('x', model.parent / 'home/l')", "to change .*home/l"),
    "hard link": ("os.link(model / 'config.json', model.parent / 'home/l')", "to change .*home/l"),
    "directory": ("os.mkdir(model.parent / 'home/d')", "to change .*home/d"),
    "database": ("sqlite3.connect(model.parent / 'home/db')", "to change .*home/db"),
}


@pytest.mark.parametrize("case", STOPPED)
def test_actions_that_no_model_needs_are_blocked(place, case):
    import re

    code, said = STOPPED[case]
    found = run(place, code)
    assert re.search(f"the model tried {said}.*this was blocked", found), found
    assert (place / "home/secret.txt").read_text() == "secret"
    assert [path.name for path in (place / "home").iterdir()] == ["secret.txt"]


@pytest.mark.parametrize("case", ["process", "write", "import from a path", "pickle"])
def test_blocked_action_is_an_error_even_if_the_model_hides_it(place, case):
    assert run(place, STOPPED[case][0], "hide").startswith("the model tried")


@pytest.mark.parametrize(
    ("variable", "folder"),
    [("HF_MODULES_CACHE", ""), ("HF_HOME", "modules"), ("XDG_CACHE_HOME", "huggingface/modules")],
)
def test_code_that_was_copied_for_the_hub_library_does_not_run(
    place, monkeypatch, variable, folder
):
    for each in ("HF_MODULES_CACHE", "HF_HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(each, raising=False)
    monkeypatch.setenv(variable, str(place / "home"))
    modules = place / "home" / folder
    modules.mkdir(parents=True, exist_ok=True)
    (place / "model/evil.py").rename(modules / "evil.py")
    code = f"sys.path.insert(0, {str(modules)!r}); sys.dont_write_bytecode = True; import evil"
    assert "to run" in run(place, code)


def test_files_that_are_not_the_models_are_not_read(place):
    found = run(place, "(model.parent / 'home/secret.txt').read_text()")
    assert found.startswith("PermissionError: ")
    assert run(place, "(model / 'link').read_text()").startswith("PermissionError: ")
    assert run(place, "open('/etc/passwd')").startswith("PermissionError: ")
    assert run(place, "shutil.rmtree(model.parent / 'home')").startswith("PermissionError: ")


HARMLESS = {
    "results": "(out / 'model.onnx').write_bytes(b'x'); os.rename(out / 'model.onnx', out / 'm')",
    "model": "(model / 'config.json').read_text()",
    "weights on another disk": "(model / 'pytorch_model.bin').read_bytes()",
    "temporary files": "d = tempfile.TemporaryDirectory(); Path(d.name, 'x').touch(); d.cleanup()",
    "packages": "import xml.dom.minidom, numpy.ma",
    "generated code": "exec(compile('1 + 1', '<string>', 'exec'))",
    "code of torch.fx": (
        "os.chdir(model); exec(compile('1', '<eval_with_key>.0 from /lib/caller.py:7', 'exec'))"
    ),
    "null": "open(os.devnull, 'w').close()",
    "facts about the machine": "open('/proc/cpuinfo').read()",
    "name tuples": "import collections; collections.namedtuple('A', 'b')",
    "parts of a tokenizer in a pickle": (
        "from tokenizers import decoders, pre_tokenizers as p;"
        "parts = [decoders.ByteLevel(), p.Sequence([p.Digits(), p.ByteLevel()])];"
        "pickle.loads(pickle.dumps(parts))"
    ),
    "database in memory": "sqlite3.connect(':memory:').close()",
}


@pytest.mark.parametrize("case", HARMLESS)
def test_loading_and_tracing_are_not_blocked(place, case):
    assert run(place, HARMLESS[case]) == "done"


def test_a_virtual_environment_in_the_models_directory_is_no_code_of_the_model(place):
    """`enginery export .` in a directory that has both."""
    packages = place / "model/.venv/site"
    packages.mkdir(parents=True)
    (packages / "installed.py").write_text("")
    code = f"import sys; sys.path.insert(0, {str(packages)!r})"
    # On the path before the process is confined, as site-packages are.
    program = PROGRAM.replace("try:\n    with", f"{code}\ntry:\n    with", 1)
    found = subprocess.run(
        [
            sys.executable,
            "-c",
            program,
            str(place / "model"),
            str(place / "out"),
            "import installed",
        ],
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])},
        capture_output=True,
        text=True,
        check=True,
    )
    assert json.loads(found.stdout) == "done"


def test_modules_are_imported_although_their_bytecode_is_among_temporary_files(place, monkeypatch):
    cache = place / "tmp/bytecode"
    monkeypatch.setenv("PYTHONPYCACHEPREFIX", str(cache))
    monkeypatch.delenv("PYTHONDONTWRITEBYTECODE", raising=False)
    subprocess.run([sys.executable, "-c", "import colorsys"], check=True)
    assert list(cache.rglob("colorsys.*.pyc"))
    assert run(place, "import colorsys") == "done"


def test_outside_of_the_block_nothing_is_stopped(place):
    code = "pass"
    program = PROGRAM + "\nprint(subprocess.run(['echo', 'free']).returncode)"
    found = subprocess.run(
        [sys.executable, "-c", program, str(place / "model"), str(place / "out"), code],
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])},
        capture_output=True,
        text=True,
        check=True,
    )
    assert found.stdout.splitlines() == ['"done"', "free", "0"] or "0" in found.stdout
