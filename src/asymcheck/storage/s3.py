"""Buckets of S3, and of servers that speak its protocol, as a store."""

from __future__ import annotations

import math
import re
import uuid
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from io import BytesIO
from typing import Literal
from urllib.parse import quote, urlencode, urlsplit

from asymcheck.errors import OptionError, StoreError, nearest
from asymcheck.storage.s3_claims import CLAIMS_FOLDER, Claims, Medium
from asymcheck.storage.s3_client import Answer, Refused, S3Client, Server
from asymcheck.storage.s3_objects import OpenObject, Writer, mark_of
from asymcheck.storage.store import Buffer, Capabilities, Entry, Readable, check_name

PROBES_FOLDER = ".probes"
"""No object name starts with a dot, so no object can lie there."""
_BUCKET = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{1,254}")
_OPTIONS = ("conditional", "connections", "endpoint", "part_mib", "profile", "region", "timeout_s")
_DEFAULT_PART_MIB = 16


class S3Store:
    """Objects under a prefix of a bucket.

    ``create`` is a conditional put (``If-None-Match: *``) where the server has it, which is
    tried out once, at the first ``create``; elsewhere see ``s3_claims.Claims`` for how it is
    done and what is promised. An open object cannot be read any more once it is deleted; one that
    is replaced meanwhile counts as deleted. Each call takes about ``timeout_s`` at most; the
    parts of a large object are a call each.

    Args:
        server: The bucket, and how to get to it.
        prefix: Where in the bucket, without slashes at its ends; empty for the whole bucket.
        part_mib: Objects that are larger are written in parts of this size, in MiB.
        conditional: ``never`` where conditional puts of the server must not be used.
    """

    def __init__(
        self,
        server: Server,
        prefix: str = "",
        part_mib: int = _DEFAULT_PART_MIB,
        conditional: Literal["auto", "never"] = "auto",
    ) -> None:
        self._server = server
        self._prefix = prefix
        self._folder = f"{prefix}/" if prefix else ""
        self._part_mib = part_mib
        self._conditional = conditional
        self._client = S3Client(server)
        self._writer = Writer(self._client, part_mib << 20)
        self._has_conditional_put: bool | None = False if conditional == "never" else None
        medium = Medium(self._put, self._keys, self._remove, self._is_there)
        self._claims = Claims(medium, lease_s=server.timeout_s)

    @property
    def url(self) -> str:
        """See ``Store``. Credentials are no part of it."""
        server, usual = self._server, Server(self._server.bucket)
        options = {
            "endpoint": server.endpoint,
            "region": server.region,
            "profile": server.profile,
            "connections": "" if server.connections == usual.connections else server.connections,
            "timeout_s": "" if server.timeout_s == usual.timeout_s else f"{server.timeout_s:g}",
            "part_mib": "" if self._part_mib == _DEFAULT_PART_MIB else self._part_mib,
            "conditional": "" if self._conditional == "auto" else self._conditional,
        }
        query = urlencode({k: v for k, v in options.items() if v != ""})
        where = f"s3://{server.bucket}" + (f"/{quote(self._prefix)}" if self._prefix else "")
        return where + (f"?{query}" if query else "")

    @property
    def capabilities(self) -> Capabilities:
        """See ``Store``. That puts are conditional is taken for granted until it was tried."""
        return Capabilities(
            durability="replicated",
            reads_survive_delete=False,
            scope="shared",
            conditional_create=self._has_conditional_put is not False,
            connections=self._server.connections,
        )

    @property
    def retries(self) -> int:
        """How many requests were made again so far."""
        return self._client.retries

    def prepare(self) -> None:
        """See ``Store``. A prefix needs not be made; that the bucket is there is looked at.

        Raises:
            StoreError: It is not, or may not be listed.
        """
        self._page("prepare", self._folder, most=1)

    def write(self, name: str, parts: Iterable[Buffer]) -> int:
        """See ``Store``."""
        return self._writer.write(self._key(name), parts)

    def create(self, name: str, data: Buffer) -> bool:
        """See ``Store``."""
        key = self._key(name)
        if self._has_conditional_put is None:
            self._has_conditional_put = self._probe()
        if self._has_conditional_put:
            return self._writer.create(key, data)
        return self._claims.create(name, bytes(data))

    @contextmanager
    def open(self, name: str) -> Iterator[Readable]:
        """See ``Store``."""
        yield OpenObject(self._client, self._key(name))

    def list(self, prefix: str = "") -> Iterator[Entry]:
        """See ``Store``."""
        top = f"{check_name(prefix)}/" if prefix else ""
        for key, nbytes in self._found("list", top):
            # Names with a dot in front are ours and no objects; folders are markers of others.
            if not key.startswith(".") and "/." not in key and not key.endswith("/"):
                yield Entry(key, nbytes)

    def delete(self, name: str) -> None:
        """See ``Store``."""
        check_name(name)
        self._remove(name)

    def sweep(self) -> int:
        """See ``Store``. Aborts what was begun in parts and not put together, below the prefix;
        removes tokens of claimants and probes.
        """
        left = [key for key, _ in self._found("sweep", "") if _is_ours(key)]
        for key in left:
            self._remove(key)
        uploads = list(self._uploads())
        for key, upload in uploads:
            asked, what = {"Key": key, "UploadId": upload}, "abort the upload of"
            try:
                self._client.call(what, key, "abort_multipart_upload", asked)
            except Refused as answer:
                if answer.code not in ("NoSuchUpload", "404"):
                    raise self._client.failed(what, key, answer) from None
        return len(left) + len(uploads)

    def free_bytes(self) -> int | None:
        """See ``Store``. A bucket has no end that it could tell of."""
        return None

    # --- keys -----------------------------------------------------------------

    def _key(self, name: str) -> str:
        return self._folder + check_name(name)

    def _put(self, name: str, data: bytes) -> None:
        self._writer.put(self._folder + name, BytesIO(data))

    def _remove(self, name: str) -> None:
        key = self._folder + name
        try:
            self._client.call("delete", key, "delete_object", {"Key": key})
        except Refused as answer:
            if not answer.is_not_found:
                raise self._client.failed("delete", key, answer) from None

    def _is_there(self, name: str) -> bool:
        return mark_of(self._client, self._folder + name) is not None

    def _keys(self, start: str) -> Iterator[str]:
        return (key for key, _ in self._found("list", start))

    def _found(self, action: str, start: str) -> Iterator[tuple[str, int]]:
        """Keys below the prefix that start so, without it, with sizes: a request per thousand."""
        token = ""
        while True:
            page = self._page(action, self._folder + start, token)
            for found in page.get("Contents", ()):
                yield str(found["Key"])[len(self._folder) :], int(found["Size"])
            token = str(page.get("NextContinuationToken", ""))
            if not token:
                return

    def _page(self, action: str, start: str, token: str = "", most: int = 1000) -> Answer:
        asked: dict[str, object] = {"Prefix": start, "MaxKeys": most}
        if token:
            asked["ContinuationToken"] = token
        return self._client.answered(action, start, "list_objects_v2", asked)

    def _uploads(self) -> Iterator[tuple[str, str]]:
        """Key and id of each upload below the prefix that is not complete."""
        asked = {"Prefix": self._folder}
        while True:
            page = self._client.answered("sweep", self._folder, "list_multipart_uploads", asked)
            for upload in page.get("Uploads", ()):
                yield str(upload["Key"]), str(upload["UploadId"])
            if not page.get("IsTruncated"):
                return
            asked["KeyMarker"] = str(page["NextKeyMarker"])
            asked["UploadIdMarker"] = str(page["NextUploadIdMarker"])

    # --- what the server can do -------------------------------------------------

    def _probe(self) -> bool:
        """Whether a second conditional put of one key is refused, as it should be."""
        name = f"{PROBES_FOLDER}/{uuid.uuid4().hex}"
        try:
            first = self._writer.create(self._folder + name, b"")
            second = self._writer.create(self._folder + name, b"")
        except Refused:
            return False
        finally:
            with suppress(StoreError):
                self._remove(name)
        return first and not second


def _is_ours(key: str) -> bool:
    return key.startswith((f"{CLAIMS_FOLDER}/", f"{PROBES_FOLDER}/"))


def open_s3(target: str, options: dict[str, str]) -> S3Store:
    """Factory of ``s3://BUCKET/PREFIX?endpoint=…&region=…&profile=…&connections=4&part_mib=16
    &timeout_s=60&conditional=auto|never``.

    Raises:
        OptionError: An option is wrong, there are credentials in the URL, or s3fs is missing.
    """
    bucket, _, prefix = target.partition("/")
    if "@" in bucket or "@" in urlsplit(options.get("endpoint", "")).netloc:
        raise OptionError(
            "s3 store: expected no user or password in a URL; give credentials in the usual "
            "places: AWS_PROFILE, ~/.aws/credentials, AWS_ACCESS_KEY_ID, the role of the machine"
        )
    if unknown := sorted(options.keys() - set(_OPTIONS)):
        raise OptionError(
            f"s3 store: unknown option {unknown[0]!r}{nearest(unknown[0], _OPTIONS)} (expected of "
            f"{list(_OPTIONS)}; credentials are never part of a URL)"
        )
    if not _BUCKET.fullmatch(bucket):
        raise OptionError(f"s3://{target}: expected the name of a bucket first, found {bucket!r}")
    prefix = prefix.strip("/")
    if prefix and not all(part and part not in (".", "..") for part in prefix.split("/")):
        raise OptionError(f"s3://{target}: expected no empty part, '.' or '..' in the prefix")
    endpoint = options.get("endpoint", "")
    if endpoint and not re.fullmatch(r"https?://[^/?#\s]+(/[^?#\s]*)?", endpoint):
        raise OptionError(f"endpoint: expected http(s)://host:port, found {endpoint!r}")
    conditional = options.get("conditional", "auto")
    if conditional not in ("auto", "never"):
        raise OptionError(f"conditional: expected 'auto' or 'never', found {conditional!r}")
    if find_spec("s3fs") is None:
        raise OptionError("s3 store: s3fs is not installed: pip install 'asymcheck[s3]'")
    return S3Store(
        Server(
            bucket=bucket,
            endpoint=endpoint,
            region=options.get("region", ""),
            profile=options.get("profile", ""),
            connections=_whole(options, "connections", 4, 1, 64),
            timeout_s=_seconds(options),
        ),
        prefix,
        _whole(options, "part_mib", _DEFAULT_PART_MIB, 5, 5120),
        "never" if conditional == "never" else "auto",
    )


def _whole(options: dict[str, str], name: str, usual: int, low: int, high: int) -> int:
    text = options.get(name, str(usual))
    if not text.isdecimal() or not low <= int(text) <= high:
        raise OptionError(f"{name}: expected a whole number from {low} to {high}, found {text!r}")
    return int(text)


def _seconds(options: dict[str, str]) -> float:
    text = options.get("timeout_s", "60")
    try:
        found = float(text)
    except ValueError:
        found = math.nan
    if not 1 <= found <= 3600:
        raise OptionError(f"timeout_s: expected 1 to 3600 seconds, found {text!r}")
    return found
