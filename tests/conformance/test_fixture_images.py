"""The fixture images before a real dockerd: each loads from its docker-archive and does what its name promises."""

from __future__ import annotations

import hashlib
import json
import tarfile
import time
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import zstandard

from conformance.host_docker import HostDocker, fresh_docker
from fixtures import FORMATS, IMAGES, FixtureError, build, image_path

pytestmark = [
    pytest.mark.root,
    pytest.mark.images,
    pytest.mark.skipif(HostDocker.missing() is not None, reason=f"no host dockerd: {HostDocker.missing()}"),
]

TAGS = {"python": "python:3.11-slim", "dind": "docker:dind", "swe-task": "swe-task:latest"}
#: What dind takes of a container around it; --privileged asks for capabilities that not every test machine has.
DIND_RIGHTS = (
    "--cap-add=SYS_ADMIN",
    "--cap-add=NET_ADMIN",
    "--security-opt=seccomp=unconfined",
    "--security-opt=apparmor=unconfined",
    "--volume=/sys/fs/cgroup:/sys/fs/cgroup",
)
NO_INNER_NETWORK = ("--bridge=none", "--iptables=false", "--ip6tables=false")


@pytest.fixture(scope="module")
def host() -> Iterator[HostDocker]:
    with fresh_docker() as docker:
        # The largest first: what stands on the same layers then loads in no time.
        for name in reversed(IMAGES):
            build(name)
            docker.docker("load", "--input", str(image_path(name)))
        yield docker


def run(host: HostDocker, image: str, *command: str, options: tuple[str, ...] = ()) -> str:
    return host.docker("run", "--rm", "--network=none", *options, TAGS[image], *command).stdout


def sh(host: HostDocker, image: str, script: str) -> str:
    return run(host, image, "sh", "-euc", script)


def inspect(host: HostDocker, image: str) -> dict[str, Any]:
    (document,) = json.loads(host.docker("image", "inspect", TAGS[image]).stdout)
    assert isinstance(document, dict)
    return document


def test_every_image_is_there_under_its_name(host: HostDocker) -> None:
    listed = host.docker("images", "--format", "{{.Repository}}:{{.Tag}}").stdout.split()
    assert sorted(listed) == sorted(TAGS.values())


def test_image_id_is_the_one_of_the_archive(host: HostDocker) -> None:
    for name in IMAGES:
        layout = image_path(name, "oci-gzip")
        (entry,) = json.loads((layout / "index.json").read_bytes())["manifests"]
        manifest = json.loads((layout / "blobs" / entry["digest"].replace(":", "/")).read_bytes())
        assert inspect(host, name)["Id"] == manifest["config"]["digest"]


def test_swe_task_stands_on_the_layers_of_python(host: HostDocker) -> None:
    python, swe = (inspect(host, name)["RootFS"]["Layers"] for name in ("python", "swe-task"))
    assert len(python) >= 4
    assert swe[: len(python)] == python
    assert len(swe) > len(python)


def test_python_commands(host: HostDocker) -> None:
    assert run(host, "python", "python", "-c", "print(6*7)") == "42\n"
    assert sh(host, "python", "python3 --version; pip --version").startswith("Python 3.11")
    assert inspect(host, "python")["Config"]["Cmd"] == ["python3"]


def test_python_layers_delete_and_replace(host: HostDocker) -> None:
    found = sh(host, "python", "cd /opt/odd; find . -path ./kept -prune -o -print | sort").split()
    assert found == [
        ".",
        "./directory-becomes-file",
        "./file-becomes-directory",
        "./file-becomes-directory/now",
        "./replaced",
        "./replaced/new",
        "./replaced/same-name",
    ]
    assert sh(host, "python", "cat /opt/odd/replaced/same-name") == "new\n"
    assert sh(host, "python", "test ! -e /usr/lib/python3.11/EXTERNALLY-MANAGED && echo gone") == "gone\n"


def test_python_odd_files(host: HostDocker) -> None:
    script = """
        cd /opt/odd/kept
        stat -c '%n %h %i' links-a/one links-a/two links-b/three | cut -d' ' -f2- | sort -u | wc -l
        stat -c '%h %F' symlink links-b/symlink-again
        stat -c '%a' setuid setgid sticky no-permissions
        stat -c '%u %g' big-ids
        stat -c '%.9Y' after-2038 nanoseconds
        for n in 59 60 61; do readlink target-$n | tr -d '\\n' | wc -c; done
        ls many | wc -l
        getcap capable /usr/bin/ping
    """
    assert sh(host, "python", script).splitlines() == [
        "1",
        *["2 symbolic link"] * 2,
        *("4755", "2755", "1777", "0"),
        "70000 4000000000",
        *("4102444800.000000000", "1700000000.123456789"),
        *("59", "60", "61"),
        "1200",
        "capable cap_net_bind_service,cap_audit_read=ep",
        "/usr/bin/ping cap_net_raw=ep",
    ]
    attributes = "import os; print(os.getxattr('/opt/odd/kept/attributes', 'user.bytes') == bytes(range(1, 256)))"
    assert run(host, "python", "python", "-c", attributes) == "True\n"


def test_swe_task_has_size_and_shape(host: HostDocker) -> None:
    count = (
        "find / -xdev ! -type d | wc -l; gcc --version | head -1; pwd; git log --oneline | wc -l; git status --short"
    )
    files, gcc, directory, commits, *changed = sh(host, "swe-task", count).splitlines()
    assert int(files) >= 30_000
    assert inspect(host, "swe-task")["Size"] >= 1_000_000_000
    assert gcc.startswith("gcc")
    assert directory == "/testbed"
    assert int(commits) > 20
    assert changed == []


def test_swe_task_imports_its_libraries(host: HostDocker) -> None:
    program = """
import django, numpy, pandas, sklearn.linear_model, sympy, pytest
x = numpy.arange(10.0).reshape(-1, 1)
fit = sklearn.linear_model.LinearRegression().fit(x, 3 * x[:, 0] + 1)
print(round(float(fit.coef_[0]), 6), sympy.integrate(sympy.Symbol("x") ** 2), pandas.DataFrame(x).sum()[0])
"""
    assert run(host, "swe-task", "python", "-c", program) == "3.0 x**3/3 45.0\n"


def test_dind_runs_what_it_is_given(host: HostDocker) -> None:
    assert run(host, "dind", "dockerd", "--version").splitlines()[-1].startswith("Docker version 20.10")
    assert run(host, "dind", "echo", "as given") == "as given\n"
    assert "Client" in host.docker("run", "--rm", "--network=none", TAGS["dind"], "version", check=False).stdout
    assert sh(host, "dind", "git --version && python3 --version && runc --version").startswith("git version 2")
    config = inspect(host, "dind")["Config"]
    assert config["Entrypoint"] == ["dockerd-entrypoint.sh"]
    assert "/var/lib/docker" in config["Volumes"]
    assert "DOCKER_TLS_CERTDIR=/certs" in config["Env"]


def test_dind_iptables_alternatives(host: HostDocker) -> None:
    def version(*options: str) -> str:
        return run(host, "dind", "dockerd", "--version", options=options).splitlines()[0]

    assert "legacy" in version("--env=DOCKER_IPTABLES_LEGACY=1")
    assert "nf_tables" in version("--env=DOCKER_IPTABLES_LEGACY=")


def wait_ready(host: HostDocker, container: str, *client: str) -> str:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        script = "docker " + " ".join(client) + " info --format '{{.Driver}} {{.ServerVersion}}'"
        done = host.docker("exec", container, "sh", "-c", script, check=False)
        if done.returncode == 0:
            return done.stdout
        time.sleep(0.2)
    pytest.fail(f"dockerd in dind did not answer: {host.docker('logs', container, check=False).stderr[-2000:]}")


def test_dind_serves_plain_tcp_without_tls_directory(host: HostDocker) -> None:
    options = (*DIND_RIGHTS, "--network=none", "--env=DOCKER_TLS_CERTDIR=", "--name=plain")
    host.docker("run", "--detach", *options, TAGS["dind"], *NO_INNER_NETWORK)
    try:
        assert wait_ready(host, "plain").startswith("overlay2 20.10")
        assert wait_ready(host, "plain", "--host=tcp://127.0.0.1:2375").startswith("overlay2")
    finally:
        host.docker("rm", "--force", "--volumes", "plain")


def test_dind_serves_tls_by_default(host: HostDocker) -> None:
    host.docker("run", "--detach", *DIND_RIGHTS, "--network=none", "--name=tls", TAGS["dind"], *NO_INNER_NETWORK)
    try:
        client = ("--tlsverify", *(f"--tls{kind}=/certs/client/{kind}.pem" for kind in ("key",)))
        client += ("--tlscacert=/certs/client/ca.pem", "--tlscert=/certs/client/cert.pem")
        assert wait_ready(host, "tls", "--host=tcp://localhost:2376", *client).startswith("overlay2")
    finally:
        host.docker("rm", "--force", "--volumes", "tls")


def test_dind_entry_point_is_a_command_of_its_own(host: HostDocker) -> None:
    script = f"""
        dockerd-entrypoint.sh --tls=false {" ".join(NO_INNER_NETWORK)} >/log 2>&1 &
        for _ in $(seq 200); do docker info >/dev/null 2>&1 && break; sleep 0.1; done
        docker info --format '{{{{.Driver}}}}'
        docker -H tcp://127.0.0.1:2375 info --format '{{{{.Driver}}}}'
    """
    options = (*DIND_RIGHTS, "--env=DOCKER_TLS_CERTDIR=")
    assert run(host, "dind", "sh", "-c", script, options=options) == "overlay2\noverlay2\n"


@pytest.mark.parametrize("format_", [f for f in FORMATS if f != "docker"])
def test_oci_layers_unpack_to_their_diff_ids(format_: str) -> None:
    for name in ("python", "dind"):
        build(name)
        layout = image_path(name, format_)

        def blob(digest: str, layout: Path = layout) -> Path:
            return layout / "blobs" / digest.replace(":", "/")

        (entry,) = json.loads((layout / "index.json").read_bytes())["manifests"]
        manifest = json.loads(blob(entry["digest"]).read_bytes())
        config = json.loads(blob(manifest["config"]["digest"]).read_bytes())
        for layer, diff_id in zip(manifest["layers"], config["rootfs"]["diff_ids"], strict=True):
            stream = zlib.decompressobj(31) if format_ == "oci-gzip" else zstandard.ZstdDecompressor().decompressobj()
            digest = hashlib.sha256()
            with blob(layer["digest"]).open("rb") as file:  # in pieces: whole layers at once are slow to allocate
                while piece := file.read(256 << 10):
                    digest.update(stream.decompress(piece))
            assert stream.eof
            assert f"sha256:{digest.hexdigest()}" == diff_id


def test_images_are_readable_by_everyone() -> None:
    for name in IMAGES:
        build(name)
        for format_ in FORMATS:
            path = image_path(name, format_)
            files = [path, *path.rglob("*")] if path.is_dir() else [path]
            assert [f for f in files if f.stat().st_mode & 0o444 != 0o444] == []
            assert all(parent.stat().st_mode & 0o001 for parent in path.parents)


def test_a_daemon_leaves_no_mount_behind(host: HostDocker) -> None:
    before = Path("/proc/self/mountinfo").read_text()
    with fresh_docker() as second:
        assert second.docker("images", "--quiet").stdout == ""
        assert Path("/proc/self/mountinfo").read_text() == before
        socket = second.socket
    assert not socket.exists()
    assert Path("/proc/self/mountinfo").read_text() == before
    assert host.docker("images", "--quiet").stdout != ""


def test_docker_archive_is_a_plain_tar_of_known_parts() -> None:
    build("python")
    with tarfile.open(image_path("python")) as tar:
        names = {member.name for member in tar}
    (config,) = [name for name in names if "/" not in name and name.endswith(".json") and name != "manifest.json"]
    assert {"manifest.json", "repositories", config} <= names
    with pytest.raises(FixtureError):
        image_path("python", "docker", cache=Path("/nonexistent"))
