"""What `deploy/` says fits what the server is."""

import json
import re
import shlex
import shutil
import subprocess

import pytest
from typer.main import get_command

from forerun.cli.serve import app
from forerun.serve.app import create_app
from forerun.serve.metrics import LoadGauges, Metrics
from tests.helpers import ROOT
from tests.serve.servers import local_server

DEPLOY = ROOT / "deploy"


def understood(words):
    """The flags of a command line of `forerun serve`."""
    return get_command(app).make_context("serve", list(words)).params


def test_the_container_starts_a_server_that_the_health_check_asks():
    text = (DEPLOY / "Dockerfile").read_text()
    entry = json.loads(re.search(r"ENTRYPOINT (\[.*\])", text)[1])
    flags = understood(entry[2:])
    assert (flags["host"], flags["port"]) == ("0.0.0.0", 8000)
    asked = re.search(r"http://127\.0\.0\.1:(\d+)(/\w+)", text)
    assert int(asked[1]) == flags["port"]
    paths = create_app(local_server().settings, server=local_server()).openapi()["paths"]
    assert asked[2] in paths
    for name in re.findall(r"^COPY (?!--from)(.+) \./", text, re.M):
        for source in name.split():
            assert (ROOT / source).exists(), source


def test_the_service_starts_a_server_and_gives_it_time_to_end():
    text = (DEPLOY / "forerun.service").read_text()
    command = re.search(r"ExecStart=\S+ serve (.*) \$FORERUN_MODELS", text)[1]
    flags = understood(shlex.split(command))
    assert int(re.search(r"TimeoutStopSec=(\d+)", text)[1]) > flags["grace"] + 5


def test_systemd_understands_the_service(tmp_path):
    program = shutil.which("systemd-analyze")
    if program is None:
        pytest.skip("systemd-analyze is not here")
    text = (DEPLOY / "forerun.service").read_text()
    text = text.replace("/opt/forerun/bin/forerun", shutil.which("true"))
    unit = tmp_path / "forerun.service"
    unit.write_text(re.sub(r"^(User|Group)=.*", r"\1=root", text, flags=re.M))
    done = subprocess.run([program, "verify", unit], capture_output=True, text=True, timeout=60)
    if "Failed to" in done.stderr and "unit" not in done.stderr:
        pytest.skip(f"it cannot run here: {done.stderr[:200]}")
    assert done.returncode == 0 and "forerun.service" not in done.stderr, done.stderr


def test_the_compose_file_mounts_what_is_there():
    yaml = pytest.importorskip("yaml")
    services = yaml.safe_load((DEPLOY / "compose.yaml").read_text())["services"]
    for service in services.values():
        for volume in service.get("volumes", []):
            source = volume.split(":")[0]
            assert not source.startswith(".") or (DEPLOY / source).exists(), source
    [job] = yaml.safe_load((DEPLOY / "prometheus.yml").read_text())["scrape_configs"]
    assert job["static_configs"][0]["targets"] == ["forerun:8000"] and "forerun" in services


def test_the_dashboard_shows_metrics_that_the_server_has():
    metrics = Metrics()
    have = {family.name for family in metrics.registry.collect()}
    have |= {gauge.name for gauge in LoadGauges([]).collect()}
    board = json.loads((DEPLOY / "grafana/dashboards/forerun.json").read_text())
    queries = [target["expr"] for panel in board["panels"] for target in panel["targets"]]
    shown = {name for query in queries for name in re.findall(r"forerun:\w+", query)}
    endings = r"_(bucket|total)$"
    assert shown and {re.sub(endings, "", name) for name in shown} <= have


def test_the_dashboard_is_what_its_program_writes():
    import runpy

    made = runpy.run_path(str(DEPLOY / "dashboard.py"))["dashboard"]()
    assert made == json.loads((DEPLOY / "grafana/dashboards/forerun.json").read_text())
