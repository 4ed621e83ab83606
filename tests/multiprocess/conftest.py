"""What is compared with ranks, bit for bit, is compiled as ranks compile; and where runs are kept."""

import os
import secrets
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import jax
import pytest

from rrfp_jax.storage import located
from tests.multiprocess.launching import eventually
from tests.multiprocess.ports import free_port, is_served


@pytest.fixture(autouse=True)
def compiled_as_by_users() -> Iterator[None]:
    """With all optimizations, which the fast tests do without elsewhere."""
    before = jax.config.read("jax_disable_most_optimizations")
    jax.config.update("jax_disable_most_optimizations", False)
    yield
    jax.config.update("jax_disable_most_optimizations", before)


@pytest.fixture(scope="session")
def bucket_server() -> Iterator[None]:
    """A server of S3's protocol, moto's, in a process of its own, with the bucket ``tests``; the environment names
    it."""
    pytest.importorskip("s3fs", reason="object stores are tested with s3fs and moto")
    pytest.importorskip("moto", reason="object stores are tested with s3fs and moto")
    import fsspec

    port = free_port()
    serve = "import logging, moto.server as m; logging.getLogger('werkzeug').setLevel(logging.ERROR); m.main({})"
    server = subprocess.Popen([sys.executable, "-c", serve.format(["-H", "127.0.0.1", "-p", str(port)])])
    try:
        os.environ |= {
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}",
            "AWS_ACCESS_KEY_ID": "anybody",
            "AWS_SECRET_ACCESS_KEY": "anything",
            "AWS_DEFAULT_REGION": "us-east-1",
        }
        assert eventually(lambda: is_served(port))
        fsspec.filesystem("s3", use_listings_cache=False).mkdir("tests")
        yield
    finally:
        server.kill()
        server.wait()


@pytest.fixture
def bucket(bucket_server: None) -> Iterator[Path]:
    """A folder in a bucket, which is empty."""
    name = f"s3://tests/{secrets.token_hex(4)}"
    yield located(name)
    for folder in Path("runs", "s3").glob(f"*{name[-8:]}*"):
        shutil.rmtree(folder)


@pytest.fixture(params=["disk", pytest.param("bucket", marks=pytest.mark.slow)])
def runs_at(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A folder for the directories of runs, on a disk and in an object store."""
    return tmp_path if request.param == "disk" else request.getfixturevalue("bucket")
