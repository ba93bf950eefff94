"""S3 servers for tests: moto, which keeps all in its memory, and the real one of SeaweedFS."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlencode

import pytest

from asymcheck.storage.s3_client import S3Client, Server

KEY, SECRET = "AKIAASYMCHECKTESTKEY", "asymcheck/secret+that+must+not+be+shown"
BUCKET = "checkpoints"
START_S = 60
SCRIPTS = Path(sys.executable).parent


def free_ports(count: int) -> list[int]:
    """Ports that are free now, and those 10000 above them too."""
    found: list[int] = []
    while len(found) < count:
        with socket.socket() as low, socket.socket() as high:
            low.bind(("127.0.0.1", 0))
            port = low.getsockname()[1]
            if port > 50000 or port in found:
                port = 20000 + port % 20000
            try:
                high.bind(("127.0.0.1", port + 10000))
            except OSError:
                continue
            found.append(port)
    return found


class Process:
    """A server that can be stopped, killed and started again on the same data."""

    def __init__(self, command: list[str], port: int, log: Path) -> None:
        self._command = command
        self._log = log
        self.endpoint = f"http://127.0.0.1:{port}"
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                self._command, stdout=log, stderr=log, stdin=subprocess.DEVNULL
            )
        end_s = time.monotonic() + START_S
        while True:
            try:
                urllib.request.urlopen(self.endpoint, timeout=2).close()
                return
            except urllib.error.HTTPError:
                return  # it speaks
            except OSError:
                if self._process.poll() is not None or time.monotonic() > end_s:
                    raise AssertionError(self._log.read_text("utf-8", "replace")[-3000:]) from None
                time.sleep(0.1)

    def signal(self, number: signal.Signals) -> None:
        assert self._process is not None
        self._process.send_signal(number)

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait(START_S)
            self._process = None


def moto(folder: Path) -> Process:
    (port,) = free_ports(1)
    command = [str(SCRIPTS / "moto_server"), "-H", "127.0.0.1", "-p", str(port)]
    return Process(command, port, folder / "moto.log")


def weed(folder: Path, gib: int = 1) -> Process:
    master, volume, filer, s3 = free_ports(4)
    data = folder / "data"
    data.mkdir()
    ports = {"master": master, "volume": volume, "filer": filer, "s3": s3}
    command = [str(SCRIPTS / "weed"), "server", f"-dir={data}", "-ip=127.0.0.1", "-s3"]
    command += ["-ip.bind=127.0.0.1", f"-volume.max={4 * gib}", "-master.volumeSizeLimitMB=256"]
    command += [f"-{name}.port={port}" for name, port in ports.items()]
    command += [f"-{name}.port.grpc={port + 10000}" for name, port in ports.items()]
    command += ["-s3.port.iceberg=0", "-s3.port.lance=0"]
    config = folder / "identities.json"
    keys = [{"accessKey": KEY, "secretKey": SECRET}]
    identity = {"name": "training", "credentials": keys, "actions": ["Admin", "Read", "Write"]}
    config.write_text(json.dumps({"identities": [identity]}))
    command.append(f"-s3.config={config}")
    return Process(command, s3, folder / "weed.log")


@contextmanager
def credentials_in(folder: Path) -> Iterator[None]:
    """Where users have them, and nowhere else."""
    (folder / "credentials").write_text(
        f"[default]\naws_access_key_id = {KEY}\naws_secret_access_key = {SECRET}\n"
        f"[wrong]\naws_access_key_id = {KEY}\naws_secret_access_key = {SECRET[::-1]}\n"
    )
    with pytest.MonkeyPatch.context() as patch:
        for name in [n for n in os.environ if n.startswith("AWS_")]:
            patch.delenv(name)
        patch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(folder / "credentials"))
        patch.setenv("AWS_CONFIG_FILE", str(folder / "none"))
        patch.setenv("AWS_EC2_METADATA_DISABLED", "true")
        patch.setenv("AWS_DEFAULT_REGION", "us-east-1")
        yield


def made_bucket(server: Process, bucket: str = BUCKET) -> None:
    S3Client(Server(bucket, server.endpoint)).call("make", "", "create_bucket", {})


def url_at(server: Process, **options: object) -> str:
    query = urlencode({"endpoint": server.endpoint, "timeout_s": 30, **options})
    return f"s3://{BUCKET}/runs/{uuid.uuid4().hex}?{query}"
