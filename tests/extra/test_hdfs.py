"""HDFS as a store, on a real name node and real data nodes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import ClassVar, NoReturn

import pytest
from hdfs_cluster import HdfsCluster, NotHereError

from asymcheck.storage.store import Store, open_store
from asymcheck.testing.suites import StoreSuite

pytestmark = [pytest.mark.extra, pytest.mark.xdist_group("hdfs")]


@pytest.fixture(scope="module")
def cluster(
    tmp_path_factory: pytest.TempPathFactory, not_run_here: Callable[[str], NoReturn]
) -> Iterator[HdfsCluster]:
    try:
        made = HdfsCluster(tmp_path_factory.mktemp("hdfs"))
    except NotHereError as reason:
        not_run_here(str(reason))
    with made:
        yield made


class TestHdfs(StoreSuite):
    of: ClassVar[HdfsCluster]

    @pytest.fixture(autouse=True)
    def _on(self, cluster: HdfsCluster) -> None:
        type(self).of = cluster

    def new_store(self, folder: Path) -> Store:
        return open_store(f"{self.of.root()}/some%20where/%C3%A9%20100%25%3F%23")
