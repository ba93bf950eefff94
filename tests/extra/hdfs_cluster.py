"""A real HDFS for tests: a name node and data nodes, from jars that a package index has.

The jars of Hadoop's servers lie in the source archive of ``pyspark==2.4.8``, which ``unearth``
gets without building it. They are kept in the cache of the user, outside the repository.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
import uuid
from collections.abc import Callable
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import Any

HADOOP = "2.7.3"
_SOURCE = "pyspark==2.4.8"
_NAME_NODE = "org.apache.hadoop.hdfs.server.namenode.NameNode"
_DATA_NODE = "org.apache.hadoop.hdfs.server.datanode.DataNode"
_WAIT_S = 60.0
_JARS = """
    hadoop-hdfs-2 hadoop-common-2 hadoop-auth-2 hadoop-annotations-2 jetty-6 jetty-util-6
    javax.servlet-api javax.ws.rs-api protobuf-java-2.5 netty-3 netty-all guava-14
    commons-beanutils commons-cli commons-codec commons-collections commons-configuration
    commons-digester commons-httpclient commons-io commons-lang-2 commons-logging commons-math3
    commons-net htrace-core-3 log4j-1.2 slf4j-api slf4j-log4j12 xmlenc xercesImpl
    jackson-core-asl jackson-mapper-asl httpclient httpcore zookeeper curator- apacheds-
    api-asn1-api gson jsr305 leveldbjni-all
"""
_FLAGS = """
    -Xmx256m -XX:+UseSerialGC -XX:-UsePerfData -XX:TieredStopAtLevel=1
    -Djava.net.preferIPv4Stack=true
    --add-opens java.base/java.lang=ALL-UNNAMED
    --add-opens java.security.jgss/sun.security.krb5=ALL-UNNAMED
    --add-exports java.security.jgss/sun.security.krb5=ALL-UNNAMED
"""
_LOG = """\
log4j.rootLogger=WARN, err
log4j.appender.err=org.apache.log4j.ConsoleAppender
log4j.appender.err.target=System.err
log4j.appender.err.layout=org.apache.log4j.PatternLayout
log4j.appender.err.layout.ConversionPattern=%d %p %c: %m%n
"""


class NotHereError(Exception):
    """This machine cannot run the servers; says why."""


def hadoop_jars() -> Path:
    """The folder of the jars; got from the package index the first time.

    Raises:
        NotHereError: The index does not have them, or cannot be reached.
    """
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    folder = home / "asymcheck-tests" / f"hadoop-{HADOOP}"
    if folder.is_dir():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as temp:
        jars = _unpack_source(Path(temp) / "source") / "deps" / "jars"
        chosen = Path(temp) / "jars"
        chosen.mkdir()
        for jar in jars.glob("*.jar"):
            if jar.name.startswith(tuple(_JARS.split())):
                jar.rename(chosen / jar.name)
        with suppress(OSError):  # another run was first
            chosen.rename(folder)
    return folder


def _unpack_source(into: Path) -> Path:
    from unearth import PackageFinder
    from unearth.errors import UnpackError

    found = PackageFinder(index_urls=_index_urls(), no_binary=["pyspark"]).find_best_match(_SOURCE)
    if found.best is None:
        raise NotHereError(f"no package index that has {_SOURCE}, with the jars of HDFS")
    try:
        return PackageFinder().download_and_unpack(found.best.link, into, into)
    except (OSError, UnpackError) as failure:
        raise NotHereError(f"{_SOURCE}, with the jars of HDFS, could not be got") from failure


def _index_urls() -> list[str]:
    """Where pip looks."""
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "config", "list"]
    listed = subprocess.run(pip, check=False, capture_output=True, text=True, timeout=60).stdout
    settings = {}
    for line in listed.splitlines():
        key, _, value = line.partition("=")
        settings[key.rpartition(".")[2]] = value.strip("'\"").replace("\\n", " ").split()
    own = settings.get("index-url") or ["https://pypi.org/simple"]
    return own + settings.get("extra-index-url", [])


def free_ports(count: int) -> list[int]:
    """Ports that nothing listens on."""
    sockets = [socket.socket() for _ in range(count)]
    try:
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]
    finally:
        for each in sockets:
            each.close()


class HdfsCluster:
    """A name node and data nodes on ports of 127.0.0.1; a context manager that ends them.

    Args:
        folder: Where they keep their files; belongs to the cluster.
        data_nodes: How many.

    Raises:
        NotHereError: Java or the jars are missing here.
    """

    def __init__(self, folder: Path, data_nodes: int = 2) -> None:
        java = shutil.which("java")
        if java is None:
            raise NotHereError("no Java to run HDFS with")
        self._java = java
        self._jars = hadoop_jars()
        self.folder = folder
        self.port, self._http = free_ports(2)
        self._ports = [free_ports(3) for _ in range(data_nodes)]
        self._running: dict[str, subprocess.Popen[bytes]] = {}
        (folder / "web" / "webapps").mkdir(parents=True)
        for page in ("hdfs", "datanode", "static"):
            (folder / "web" / "webapps" / page).mkdir()

    @property
    def url(self) -> str:
        """The name node, without a path."""
        return f"hdfs://127.0.0.1:{self.port}"

    @cached_property
    def client(self) -> Any:
        """A client of its own. It lives as long as this: its end waits for its threads, for ever
        in a fork.
        """
        import hdfs_native

        return hdfs_native.Client(self.url)

    def root(self) -> str:
        """A URL that no test has used."""
        return f"{self.url}/tests/{uuid.uuid4().hex}"

    def __enter__(self) -> HdfsCluster:
        try:
            self._configure("name", {})
            done = subprocess.run(
                self._command("name", _NAME_NODE, "-format", "-nonInteractive"),
                check=False,
                capture_output=True,
                timeout=_WAIT_S,
            )
            assert done.returncode == 0, done.stderr.decode()[-4000:]
            self.start_name_node()
            for node in range(len(self._ports)):
                self.start_data_node(node)
            self.wait_until_writable()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End every server."""
        for name in list(self._running):
            self._end(name)

    # --- faults -------------------------------------------------------------

    def start_name_node(self) -> None:
        """Start it; see ``wait_until_writable``."""
        self._start("name", _NAME_NODE)

    def kill_name_node(self) -> None:
        """SIGKILL; what clients were told stays on its disk."""
        self._end("name")

    def start_data_node(self, node: int) -> None:
        """Start one; see ``wait_until_writable``."""
        data, ipc, http = self._ports[node]
        self._configure(
            f"data{node}",
            {
                "dfs.datanode.address": f"127.0.0.1:{data}",
                "dfs.datanode.ipc.address": f"127.0.0.1:{ipc}",
                "dfs.datanode.http.address": f"127.0.0.1:{http}",
                "dfs.datanode.data.dir": f"file://{self.folder}/data{node}/blocks",
            },
        )
        self._start(f"data{node}", _DATA_NODE)

    def kill_data_node(self, node: int) -> None:
        """SIGKILL."""
        self._end(f"data{node}")

    def pause_name_node(self) -> None:
        """SIGSTOP: it accepts connections and does not answer."""
        self._running["name"].send_signal(signal.SIGSTOP)

    def resume_name_node(self) -> None:
        """SIGCONT."""
        self._running["name"].send_signal(signal.SIGCONT)

    def mend(self) -> None:
        """Start what was killed, and wait until all is as it was."""
        nodes = [n for n in range(len(self._ports)) if f"data{n}" not in self._running]
        for node in nodes:
            self.start_data_node(node)
        if "name" not in self._running:
            self.start_name_node()
            nodes.append(-1)
        if nodes:
            self.wait_until_writable()

    def run_admin(self, *arguments: str) -> None:
        """A command of ``hdfs dfsadmin``."""
        main = "org.apache.hadoop.hdfs.tools.DFSAdmin"
        done = subprocess.run(
            self._command("name", main, *arguments),
            check=False,
            capture_output=True,
            timeout=_WAIT_S,
        )
        assert done.returncode == 0, done.stderr.decode()[-4000:]

    def wait_until_writable(self) -> None:
        """Until the name node has left safe mode and knows every data node that runs."""
        running = sum(name.startswith("data") for name in self._running)

        def ready() -> bool:
            with suppress(OSError, LookupError):  # it answers before it knows
                state = self._bean("FSNamesystemState")
                return state["FSState"] == "Operational" and state["NumLiveDataNodes"] >= running
            return False

        self._wait(ready, "ready")

    def wait_until_missed(self, live: int) -> None:
        """Until the name node counts ``live`` data nodes only."""
        self._wait(
            lambda: self._bean("FSNamesystemState")["NumLiveDataNodes"] == live, "counted again"
        )

    # --- processes ----------------------------------------------------------

    def _wait(self, ready: Callable[[], bool], what: str) -> None:
        until_s = time.monotonic() + _WAIT_S
        while not ready():
            for name, process in self._running.items():
                assert process.poll() is None, f"{name} ended:\n{self._log_of(name)}"
            assert time.monotonic() < until_s, f"not {what}:\n{self._log_of('name')}"
            time.sleep(0.1)

    def _bean(self, name: str) -> dict[str, Any]:
        query = f"http://127.0.0.1:{self._http}/jmx?qry=Hadoop:service=NameNode,name={name}"
        with urllib.request.urlopen(query, timeout=5) as answer:
            found: dict[str, Any] = json.load(answer)["beans"][0]
        return found

    def _configure(self, name: str, own: dict[str, str]) -> None:
        settings = {
            "fs.defaultFS": self.url,
            "dfs.namenode.rpc-address": f"127.0.0.1:{self.port}",
            "dfs.namenode.http-address": f"127.0.0.1:{self._http}",
            "dfs.namenode.name.dir": f"file://{self.folder}/names",
            "dfs.replication": str(len(self._ports)),
            "dfs.webhdfs.enabled": "false",
            "dfs.heartbeat.interval": "1",
            "dfs.namenode.heartbeat.recheck-interval": "500",
            "dfs.namenode.stale.datanode.interval": "3000",
            "dfs.namenode.safemode.extension": "0",
            "dfs.namenode.datanode.registration.ip-hostname-check": "false",
            "dfs.client.block.write.replace-datanode-on-failure.policy": "NEVER",
            "hadoop.tmp.dir": f"{self.folder}/tmp",
            **own,
        }
        conf = self.folder / name / "conf"
        conf.mkdir(parents=True, exist_ok=True)
        rows = "".join(
            f"<property><name>{key}</name><value>{value}</value></property>\n"
            for key, value in settings.items()
        )
        for site in ("core-site.xml", "hdfs-site.xml"):
            (conf / site).write_text(f"<configuration>\n{rows}</configuration>\n")
        (conf / "log4j.properties").write_text(_LOG)

    def _command(self, name: str, main: str, *arguments: str) -> list[str]:
        path = [self.folder / name / "conf", self.folder / "web", *sorted(self._jars.glob("*.jar"))]
        classes = ":".join(map(str, path))
        ends_with_us = [found, "--pdeathsig", "KILL"] if (found := shutil.which("setpriv")) else []
        return [*ends_with_us, self._java, *_FLAGS.split(), "-cp", classes, main, *arguments]

    def _start(self, name: str, main: str) -> None:
        with (self.folder / name / "log").open("ab") as log:
            self._running[name] = subprocess.Popen(
                self._command(name, main),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd=self.folder,
            )

    def _end(self, name: str) -> None:
        process = self._running.pop(name)
        process.kill()
        process.wait(_WAIT_S)

    def _log_of(self, name: str) -> str:
        return (self.folder / name / "log").read_text(errors="replace")[-4000:]
