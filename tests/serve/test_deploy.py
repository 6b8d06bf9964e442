"""The deployment files agree with the code: options, routes, metrics; and with good practice."""

import dataclasses
import json
import re
import shutil
import socket
import subprocess
import time
from contextlib import suppress
from pathlib import Path

import httpx
import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from enginery.core.version import __version__
from enginery.runtime.nvml import Nvml
from enginery.serve.batching.scheduler import BatchStatistics, Timings
from enginery.serve.config import ServeConfig
from enginery.serve.observability.metrics import Metrics
from enginery.serve.observability.record import RequestRecord
from tests.runtime.fake_nvml import FakeNvml
from tests.serve.test_service import serving

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "docs/deploy"
DOCKERFILES = ("Dockerfile.cpu", "Dockerfile.cuda", "Dockerfile.tensorrt-rtx")
OPTIONS = {f"--{field.name.replace('_', '-')}" for field in dataclasses.fields(ServeConfig)}
HEALTH = {"/v2/health/live", "/v2/health/ready"}


class Hosted:
    name, task, state = "minilm", "feature-extraction", "ready"

    def info(self):
        return {
            "providers": [{"name": "CUDAExecutionProvider", "options": {}}],
            "precision": "fp32",
            "task": self.task,
            "engines": [],
            "queue": {"inputs": 0, "tokens": 0},
            "running": {"rows": 0, "waiting": 0},
            "cuda_graphs": {"recorded": 1, "unrecorded_runs": 1},
        }


def exposed_metrics():
    """Every sample's name once something has happened."""
    metrics = Metrics()
    metrics.watch_models(lambda: [Hosted()])
    record = RequestRecord("r1", "POST", "/embed", "", 0.0, "/embed", model="minilm")
    record.timings, record.inputs, record.status, record.ended = Timings(), 1, 200, 0.1
    record.generated, record.first_token_at = 3, 0.05
    metrics.observe(record)
    metrics.observe_batch("minilm", BatchStatistics(1, 1, 1, 0.1))
    record.status, record.timings = 429, None
    metrics.observe(record)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Nvml, "open", lambda device: Nvml(FakeNvml(), b""))
        body = metrics.exposition()[0].decode()
    families = text_string_to_metric_families(body)
    samples = [sample for family in families for sample in family.samples]
    return {sample.name: set(sample.labels) for sample in samples}


def check_expression(text):
    """Names and labels of a PromQL expression are ones that the server exposes."""
    known = exposed_metrics()
    recorded = re.compile(r"\benginery:\w+:\w+")
    for name, selector in re.findall(
        r"\b((?:enginery|process)_\w+)(\{[^}]*\})?", recorded.sub("", text)
    ):
        assert name in known, f"{name} in {text}"
        labels = set(re.findall(r"(\w+)\s*[=!]~?", selector))
        assert labels <= known[name] | {"job", "instance"}, f"{labels} of {name}"


def check_options(words):
    """Options of `enginery serve` exist, and their values are ones it takes."""
    fields = {f"--{f.name.replace('_', '-')}": f for f in dataclasses.fields(ServeConfig)}
    words = [part for word in words for part in word.split("=", 1)]
    for word, value in zip(words, [*words[1:], ""], strict=True):
        if word.startswith("--"):
            assert word in OPTIONS, word
            if fields[word].type in ("int", "float"):
                float(value)


# Dockerfiles


def instructions(name):
    """(instruction, rest) of a Dockerfile, continued lines put together."""
    lines = (DEPLOY / name).read_text(encoding="utf-8").splitlines()
    text = "\n".join(line for line in lines if not line.lstrip().startswith("#"))
    found = [line.split(None, 1) for line in text.replace("\\\n", " ").splitlines() if line.strip()]
    return [(word, rest.strip()) for word, rest in found]


@pytest.mark.parametrize("name", DOCKERFILES)
def test_dockerfile_is_multi_stage_pinned_and_not_root(name):
    found = instructions(name)
    known = {
        "FROM",
        "ARG",
        "WORKDIR",
        "RUN",
        "ENV",
        "COPY",
        "USER",
        "EXPOSE",
        "HEALTHCHECK",
        "STOPSIGNAL",
        "ENTRYPOINT",
        "CMD",
    }
    assert {word for word, _ in found} <= known  # no ADD, no MAINTAINER
    images = [rest for word, rest in found if word == "FROM"]
    assert len(images) == 2
    assert images[0].endswith(" AS build")
    assert all(re.match(r"python:3\.\d+-slim-\w+", image) for image in images)
    last = [word for word, _ in found].index("FROM", 1)
    users = [rest for word, rest in found[last:] if word == "USER"]
    assert users
    assert all(re.fullmatch(r"[1-9]\d*:[1-9]\d*", user) for user in users)
    # Nothing runs or is copied once the user is nobody: it would belong to another.
    after = [word for word, _ in found[[word for word, _ in found].index("USER") :]]
    assert not {"RUN", "COPY"} & set(after)


@pytest.mark.parametrize("name", DOCKERFILES)
def test_dockerfile_installs_the_serving_extra_and_no_framework(name):
    runs = " ".join(rest for word, rest in instructions(name) if word == "RUN")
    (install,) = re.findall(r"pip install[^&]*", runs)
    assert "--no-cache-dir" in install
    assert "--constraint constraints.txt" in install
    arguments = dict(rest.split("=", 1) for word, rest in instructions(name) if word == "ARG")
    install = install.replace('".[$EXTRAS]"', f"'.[{arguments.get('EXTRAS')}]'")
    assert re.search(r"'\.\[serve,(cpu|gpu)\]'", install)
    assert not re.search(r"\b(torch|transformers|optimum|export)\b", runs)
    assert "apt-get" not in runs
    assert "sudo" not in runs


@pytest.mark.parametrize("name", DOCKERFILES)
def test_dockerfile_copies_existing_files_that_the_build_needs(name):
    copied = [rest.split()[:-1] for word, rest in instructions(name) if word == "COPY"]
    sources = {source for words in copied for source in words if not words[0].startswith("--")}
    assert all((ROOT / source).exists() for source in sources), sources
    assert {"pyproject.toml", "constraints.txt", "README.md", "LICENSE", "enginery"} <= sources
    assert ["--from=build", "/opt/enginery"] in copied


@pytest.mark.parametrize("name", DOCKERFILES)
def test_dockerfile_starts_the_server_itself_and_asks_its_health(name):
    found = dict(instructions(name))
    entry = json.loads(found["ENTRYPOINT"])  # exec form: no shell between it and SIGTERM
    assert entry[:2] == ["enginery", "serve"]
    check_options(entry[2:])
    assert json.loads(found["CMD"]) == ["/models/model"]
    options, _, command = found["HEALTHCHECK"].partition("CMD ")
    assert {"--interval", "--timeout", "--start-period", "--retries"} == {
        word.partition("=")[0] for word in options.split()
    }
    words = json.loads(command)
    assert words[:2] == ["python", "-c"]
    compile(words[2], "healthcheck", "exec")
    port = entry[entry.index("--port") + 1]
    (url,) = re.findall(r"http://127\.0\.0\.1:(\d+)(/[\w/]+)", words[2])
    assert url == (port, "/v2/health/ready")
    assert found["EXPOSE"] == port


BUILDER = next((name for name in ("docker", "podman", "buildah") if shutil.which(name)), "")


@pytest.mark.slow
@pytest.mark.skipif(not BUILDER, reason="docker, podman or buildah is needed")
@pytest.mark.parametrize("name", ["Dockerfile.cpu", "Dockerfile.tensorrt-rtx"])
def test_image_is_built(name):
    """The image for CUDA takes gigabytes, and is left out."""
    tag = name.lower().replace("dockerfile.", "enginery-test:")
    words = [BUILDER, "build", "--file", str(DEPLOY / name), "--tag", tag, str(ROOT)]
    built = subprocess.run(words, capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stdout[-2000:] + built.stderr[-2000:]
    words = [BUILDER, "run", "--rm", "--entrypoint", "enginery", tag, "--version"]
    if BUILDER == "buildah":  # it runs containers, not images
        container = subprocess.check_output([BUILDER, "from", "--pull=never", tag], text=True)
        words = [BUILDER, "run", container.strip(), "--", "enginery", "--version"]
    assert subprocess.check_output(words, text=True).strip() == __version__


# Kubernetes


@pytest.fixture(scope="module")
def objects():
    text = (DEPLOY / "kubernetes.yaml").read_text(encoding="utf-8")
    return {found["kind"]: found for found in yaml.safe_load_all(text)}


def test_kubernetes_objects_belong_together(objects):
    assert {kind: found["apiVersion"] for kind, found in objects.items()} == {
        "Deployment": "apps/v1",
        "Service": "v1",
        "PodDisruptionBudget": "policy/v1",
    }
    labels = objects["Deployment"]["spec"]["template"]["metadata"]["labels"]
    assert objects["Deployment"]["spec"]["selector"]["matchLabels"] == labels
    assert objects["Service"]["spec"]["selector"] == labels
    assert objects["PodDisruptionBudget"]["spec"]["selector"]["matchLabels"] == labels
    budget = objects["PodDisruptionBudget"]["spec"]["minAvailable"]
    assert budget < objects["Deployment"]["spec"]["replicas"]


def test_kubernetes_pod_is_probed_drained_and_confined(objects):
    pod = objects["Deployment"]["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    assert ports == {"http": ServeConfig().port}
    for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
        assert container[probe]["httpGet"]["path"] in HEALTH
        assert container[probe]["httpGet"]["port"] in ports
    # A pod that only waits for its queue must not be killed.
    assert container["livenessProbe"]["httpGet"]["path"] == "/v2/health/live"
    assert container["readinessProbe"]["httpGet"]["path"] == "/v2/health/ready"
    check_options(container["args"])
    seconds = {
        name: float(value)
        for name, _, value in (word.partition("=") for word in container["args"][1:])
        if name in ("--grace", "--drain-delay")
    }
    assert pod["terminationGracePeriodSeconds"] > sum(seconds.values())
    assert pod["securityContext"]["runAsNonRoot"]
    secure = container["securityContext"]
    assert secure["readOnlyRootFilesystem"]
    assert not secure["allowPrivilegeEscalation"]
    assert secure["capabilities"] == {"drop": ["ALL"]}
    assert container["resources"]["limits"]["memory"]
    volumes = {volume["name"] for volume in pod["volumes"]}
    mounts = {mount["name"]: mount for mount in container["volumeMounts"]}
    assert set(mounts) == volumes
    assert mounts["models"]["readOnly"]
    for name in DOCKERFILES:  # what is written has to be written somewhere
        text = (DEPLOY / name).read_text()
        home = re.search(r"ENGINERY_HOME=(\S+)", text).group(1)
        assert mounts["cache"]["mountPath"] == home
        if "EXTRAS" in text:  # what is downloaded as well
            assert re.search(r"HF_HOME=(\S+)", text).group(1).startswith(f"{home}/")


# Prometheus and Grafana


def test_alerts_use_existing_metrics():
    groups = yaml.safe_load((DEPLOY / "prometheus-rules.yaml").read_text(encoding="utf-8"))
    rules = [rule for group in groups["groups"] for rule in group["rules"]]
    names = [rule.get("alert") or rule["record"] for rule in rules]
    assert len(names) == len(set(names))
    for rule in rules:
        check_expression(rule["expr"])
        assert rule["expr"].count("(") == rule["expr"].count(")")
        if "alert" in rule:
            assert rule["labels"]["severity"] in ("critical", "warning", "info")
            assert rule["annotations"]["summary"]


def test_dashboard_panels_use_existing_metrics():
    board = json.loads((DEPLOY / "grafana.json").read_text(encoding="utf-8"))
    panels = board["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    variables = {variable["name"] for variable in board["templating"]["list"]}
    expressions = [target["expr"] for panel in panels for target in panel["targets"]]
    for text in expressions:
        check_expression(text)
        assert text.count("(") == text.count(")")
        assert set(re.findall(r"\$(\w+)", text)) <= variables | {"__rate_interval"}
    shown = set(re.findall(r"\benginery_\w+", " ".join(expressions)))
    families = {re.sub(r"_(bucket|sum|count)$", "", name) for name in shown}
    known = {re.sub(r"_(bucket|sum|count)$", "", n) for n in exposed_metrics() if "enginery" in n}
    assert families == known  # every metric of ours is on the board


def test_dashboard_panels_do_not_overlap():
    board = json.loads((DEPLOY / "grafana.json").read_text(encoding="utf-8"))
    taken = set()
    for panel in board["panels"]:
        place = panel["gridPos"]
        cells = {
            (place["x"] + x, place["y"] + y) for x in range(place["w"]) for y in range(place["h"])
        }
        assert not cells & taken, panel["title"]
        assert max(x for x, _ in cells) < 24
        taken |= cells


# systemd


def unit():
    found = {}
    for line in (DEPLOY / "enginery.service").read_text(encoding="utf-8").splitlines():
        if "=" in line and not line.startswith("#"):
            name, _, value = line.partition("=")
            found.setdefault(name, []).append(value)
    return found


def test_unit_starts_drains_and_confines_the_server():
    found = unit()
    words = found["ExecStart"][0].split()
    assert words[0].endswith("/bin/enginery")
    assert words[1] == "serve"
    check_options(words[2:])
    grace = float(words[words.index("--grace") + 1])
    assert float(found["TimeoutStopSec"][0]) > grace
    assert found["KillSignal"] == ["SIGTERM"]
    assert found["NoNewPrivileges"] == found["DynamicUser"] == ["yes"]
    assert found["ProtectSystem"] == ["strict"]
    home = re.search(r"ENGINERY_HOME=(\S+)", " ".join(found["Environment"])).group(1)
    assert home == f"/var/cache/{found['CacheDirectory'][0]}"


@pytest.mark.skipif(not shutil.which("systemd-analyze"), reason="systemd is not installed")
def test_systemd_accepts_the_unit(tmp_path):
    text = (DEPLOY / "enginery.service").read_text(encoding="utf-8")
    program = tmp_path / "enginery"
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    copy = tmp_path / "enginery.service"
    copy.write_text(text.replace("/opt/enginery/bin/enginery serve", f"{program} serve"))
    words = ["systemd-analyze", "verify", "--man=no", str(copy)]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert "enginery.service" not in done.stderr, done.stderr


# nginx


@pytest.fixture
def nginx(tmp_path):
    """`nginx(port)`: the address of a reverse proxy with our configuration before that port."""
    program = shutil.which("nginx") or shutil.which("nginx", path="/usr/sbin")
    if program is None:
        pytest.skip("nginx is not installed")
    started = []

    def make(port):
        with socket.create_server(("127.0.0.1", 0)) as free:
            own = free.getsockname()[1]
        text = (DEPLOY / "nginx.conf").read_text(encoding="utf-8")
        text = text.replace("listen 80;", f"listen 127.0.0.1:{own};")
        text = text.replace("127.0.0.1:8000", f"127.0.0.1:{port}")
        places = "".join(
            f"{name}_temp_path {tmp_path}/{name};\n"
            for name in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
        )
        (tmp_path / "nginx.conf").write_text(
            f"daemon off; master_process off; pid {tmp_path}/pid; error_log {tmp_path}/error;\n"
            f"events {{}}\nhttp {{\naccess_log off;\n{places}{text}}}\n"
        )
        words = [program, "-e", f"{tmp_path}/error", "-c", f"{tmp_path}/nginx.conf"]
        started.append(subprocess.Popen(words))
        while True:
            assert started[-1].poll() is None, (tmp_path / "error").read_text()
            with suppress(OSError):
                socket.create_connection(("127.0.0.1", own)).close()
                return f"http://127.0.0.1:{own}"
            time.sleep(0.02)

    yield make
    for process in started:
        process.terminate()
        process.wait()


def test_nginx_answers_for_the_server_and_waits_for_slow_clients(nginx, tiny_paths):
    body = b'{"inputs": "the pump is warm"}'
    head = b"POST /embed HTTP/1.1\r\nHost: a\r\nContent-Length: %d\r\n\r\n" % len(body)
    with serving(tiny_paths("vectors")["vectors"]) as server:
        address = nginx(server.url.rpartition(":")[2])
        with httpx.Client(base_url=address, timeout=60) as client:
            for _ in range(3):
                assert client.post("/embed", content=body).status_code == 200
            assert client.post("/embed", content=b"x" * 9_000_000).status_code == 413
        host, port = address.removeprefix("http://").split(":")
        began = time.perf_counter()
        with socket.create_connection((host, port), timeout=60) as slow:
            for byte in head + body:
                slow.sendall(bytes([byte]))
                time.sleep(0.02)
            assert slow.recv(65536).startswith(b"HTTP/1.1 200 ")
        took_ms = (time.perf_counter() - began) * 1e3
        server.process.terminate()
        assert server.process.wait(60) == 0
        log = [json.loads(line) for line in server.process.stdout]
    lines = [line for line in log if line["path"] == "/embed"]
    assert [line["status"] for line in lines] == [200] * 4  # nginx itself has refused the large one
    assert lines[-1]["duration_ms"] < took_ms / 2  # it got the request when all of it was there
    assert len({line["client"] for line in lines}) == 1  # X-Forwarded-For, which has no port


# Documentation


def documented(pattern):
    """First and second cells of the rows whose first cell matches."""
    text = (ROOT / "docs/serve.md").read_text(encoding="utf-8")
    return dict(re.findall(rf"^\| `({pattern})` \| ([^|]*)\|", text, re.MULTILINE))


def shown_default(value):
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, int | float):
        return f"{value:,}" if isinstance(value, int) else f"{value:g}"
    return value or ""


def test_options_of_the_documentation_have_their_defaults():
    found = {name: cell.strip().strip("`") for name, cell in documented(r"--[a-z-]+").items()}
    known = {
        f"--{field.name.replace('_', '-')}": (
            "8000" if field.name == "port" else shown_default(field.default)
        )
        for field in dataclasses.fields(ServeConfig)
    }
    assert len(found) > 10
    assert found.items() <= known.items()


def test_documentation_has_every_metric_with_its_labels():
    known = {}
    for name, labels in exposed_metrics().items():
        family = re.sub(r"_(bucket|sum|count)$", "", name)
        if name.startswith("enginery_"):
            known[family] = known.get(family, set()) | labels - {"le"}
    found = {
        name: set(cell.replace(",", " ").split())
        for name, cell in documented(r"enginery_\w+").items()
    }
    assert found == known
