"""Run a command beside real servers of HDFS and S3, to measure with them.

In its arguments ``{hdfs}`` and ``{s3}`` become URLs of new places there:

    python tests/extra/beside_servers.py asymlab tiers --tier HDFS={hdfs} --tier S3={s3}
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

from hdfs_cluster import HdfsCluster
from s3_servers import credentials_in, made_bucket, url_at, weed

GIB_OF_S3 = 16


def main(command: list[str]) -> int:
    with tempfile.TemporaryDirectory(prefix="servers-") as scratch:
        folders = [Path(scratch) / name for name in ("hdfs", "s3", "credentials")]
        for folder in folders:
            folder.mkdir()
        hdfs, s3, credentials = folders
        with credentials_in(credentials), HdfsCluster(hdfs) as cluster:
            server = weed(s3, gib=GIB_OF_S3)
            try:
                server.start()
                made_bucket(server)
                places = {"hdfs": cluster.root(), "s3": url_at(server)}
                here = [argument.format_map(places) for argument in command]
                return subprocess.run(here, check=False).returncode
            finally:
                server.kill()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
