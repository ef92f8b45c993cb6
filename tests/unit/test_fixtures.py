"""The parts of the image recipes that need neither root nor network: layers, packing, the cache."""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import os
import tarfile
from pathlib import Path

import pytest
import zstandard

from fixtures import FixtureError, build, image_path, prune
from fixtures.__main__ import main
from fixtures.cache import publish
from fixtures.keys import image_key, meaning, stage_key
from fixtures.layers import EPOCH, Layer, LayerWriter, member, snapshot, write_changes
from fixtures.pack import ImageConfig, config_json, write_docker_archive, write_oci_layout
from fixtures.recipes.python import capability, write_odd_files, write_replacements


def changes(directory: Path, root: Path, before: dict[bytes, object] | None = None) -> Layer:
    with LayerWriter(directory, "a test") as writer:
        write_changes(writer, root, before or {})  # type: ignore[arg-type]
    assert writer.layer
    return writer.layer


def entries(layer: Layer) -> dict[str, tarfile.TarInfo]:
    with tarfile.open(layer.directory / "layer.tar") as tar:
        return {entry.name: entry for entry in tar}


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    root = tmp_path / "root"
    (root / "etc").mkdir(parents=True)
    (root / "etc/first").write_text("one")
    (root / "etc/second").hardlink_to(root / "etc/first")
    (root / "bin").mkdir()
    (root / "bin/link").symlink_to("../etc/first")
    (root / "tmp").mkdir()
    (root / "tmp/left-over").write_text("of the build")
    os.utime(root / "etc/first", (EPOCH - 50, EPOCH - 50))
    return root


def test_layer_forms_hold_the_same_tar(tree: Path, tmp_path: Path) -> None:
    layer = changes(tmp_path / "layer", tree)
    tar = (layer.directory / "layer.tar").read_bytes()
    zipped, zstd = ((layer.directory / f"layer.tar.{kind}").read_bytes() for kind in ("gz", "zst"))
    assert (sha256(tar), sha256(zipped), sha256(zstd)) == (layer.tar, layer.gzip, layer.zstd)
    assert (len(tar), len(zipped), len(zstd)) == (layer.tar_size, layer.gzip_size, layer.zstd_size)
    assert gzip.decompress(zipped) == tar
    assert zstandard.ZstdDecompressor().decompress(zstd, max_output_size=len(tar)) == tar
    assert Layer.load(layer.directory) == layer


def test_layer_is_the_same_every_time(tree: Path, tmp_path: Path) -> None:
    one, two = changes(tmp_path / "one", tree), changes(tmp_path / "two", tree)
    assert (one.tar, one.gzip, one.zstd) == (two.tar, two.gzip, two.zstd)


def test_first_layer_holds_the_tree_sorted_with_links_and_clamped_times(tree: Path, tmp_path: Path) -> None:
    found = entries(changes(tmp_path / "layer", tree))
    assert list(found) == ["bin", "bin/link", "etc", "etc/first", "etc/second", "tmp"]
    assert found["etc/second"].islnk()
    assert found["etc/second"].linkname == "etc/first"
    assert found["bin/link"].linkname == "../etc/first"
    assert found["etc/first"].mtime == EPOCH - 50
    assert found["bin"].mtime == EPOCH, "a time of the build's own is not reproducible"
    assert {entry.uname for entry in found.values()} == {""}


def test_upper_layer_holds_changes_parents_and_whiteouts(tree: Path, tmp_path: Path) -> None:
    (tree / "gone/deep").mkdir(parents=True)
    (tree / "gone/deep/file").touch()
    before = snapshot(tree)
    (tree / "etc/new").write_text("new")
    (tree / "bin/link").unlink()
    (tree / "gone/deep/file").unlink()
    (tree / "gone/deep").rmdir()
    (tree / "gone").rmdir()
    found = entries(changes(tmp_path / "layer", tree, dict(before)))
    assert list(found) == ["bin/.wh.link", ".wh.gone", "bin", "etc", "etc/new"]


def test_upper_layer_sees_a_change_of_mode_alone(tree: Path, tmp_path: Path) -> None:
    before = snapshot(tree)
    (tree / "etc/first").chmod(0o4755)
    found = entries(changes(tmp_path / "layer", tree, dict(before)))
    assert found["etc/first"].mode == 0o4755
    assert "etc/second" in found, "the other name of the changed inode belongs to the layer"


def test_content_of_another_size_than_announced_is_refused(tmp_path: Path) -> None:
    writer = LayerWriter(tmp_path / "layer", "a test")
    with pytest.raises(ValueError, match="1 bytes given, 2 announced"):
        writer.add(member("file", size=2), b"x")
    with pytest.raises(ValueError, match="1 bytes short"):
        writer.add(member("file", size=2), io.BytesIO(b"x"))


def test_odd_files_survive_a_round_trip_through_tar(tmp_path: Path) -> None:
    with LayerWriter(tmp_path / "layer", "odd") as writer:
        write_odd_files(writer)
    assert writer.layer
    found = entries(writer.layer)
    kept = "opt/odd/kept/"
    assert found[kept + "setuid"].mode == 0o4755
    assert [found[f"{kept}target-{n}"].linkname for n in (59, 60, 61)] == [
        ("t/" * n)[: n - 1] + "x" for n in (59, 60, 61)
    ]
    again = found[kept + "links-b/symlink-again"]
    assert again.islnk()
    assert found[again.linkname].issym()
    assert found[kept + "before-1970"].mtime == -86_400
    assert found[kept + "after-2038"].mtime > 2**31
    assert found[kept + "big-ids"].gid == 4_000_000_000
    assert os.fsencode(kept) + b"latin-\xe9\xff" in [os.fsencode(name) for name in found]
    records = found[kept + "attributes"].pax_headers
    assert records["SCHILY.xattr.user.bytes"].encode("utf-8", "surrogateescape") == bytes(range(1, 256))
    capable = found[kept + "capable"].pax_headers["SCHILY.xattr.security.capability"]
    assert len(capable.encode("utf-8", "surrogateescape")) == 20
    assert any(name.endswith("/leaf") for name in found)
    assert kept + "level-00-of-a-long-path" not in found, "an implicit parent has no entry"


def test_replacements_delete_and_replace_what_the_layer_below_has(tmp_path: Path) -> None:
    with LayerWriter(tmp_path / "below", "odd") as writer:
        write_odd_files(writer)
    with LayerWriter(tmp_path / "above", "replace") as upper:
        write_replacements(upper)
    assert writer.layer
    assert upper.layer
    below, above = entries(writer.layer), entries(upper.layer)
    whiteouts = [Path(name) for name in above if ".wh." in name]
    deleted = [str(path.with_name(path.name.removeprefix(".wh."))) for path in whiteouts if path.name != ".wh..wh..opq"]
    assert {name for name in deleted if name.startswith("opt/")} <= below.keys()
    assert "opt/odd/replaced/.wh..wh..opq" in above
    assert below["opt/odd/directory-becomes-file"].isdir()
    assert above["opt/odd/directory-becomes-file"].isfile()


def test_capability_is_a_revision_2_value() -> None:
    # As `setcap cap_net_raw+ep` writes it.
    assert capability(1 << 13) == bytes.fromhex("0100000200200000000000000000000000000000")


@pytest.fixture
def packed(tree: Path, tmp_path: Path) -> tuple[bytes, list[Layer]]:
    layers = [changes(tmp_path / "layer-1", tree)]
    before = snapshot(tree)
    (tree / "new").write_text("new")
    layers.append(changes(tmp_path / "layer-2", tree, dict(before)))
    return config_json(ImageConfig(env=["A=b"], cmd=["sh"], steps=["ENV A=b"]), layers), layers


def test_docker_archive_names_its_layers_and_configuration(packed: tuple[bytes, list[Layer]], tmp_path: Path) -> None:
    config, layers = packed
    write_docker_archive(tmp_path / "image.tar", "some/name:tag", config, layers)
    with tarfile.open(tmp_path / "image.tar") as tar:

        def read(name: str) -> bytes:
            content = tar.extractfile(name)
            assert content
            return content.read()

        (manifest,) = json.loads(read("manifest.json"))
        assert manifest["RepoTags"] == ["some/name:tag"]
        assert manifest["Config"] == f"{sha256(config)}.json"
        assert read(manifest["Config"]) == config
        diff_ids = json.loads(config)["rootfs"]["diff_ids"]
        assert [f"sha256:{sha256(read(name))}" for name in manifest["Layers"]] == diff_ids
        top = manifest["Layers"][-1].split("/")[0]
        assert json.loads(read("repositories")) == {"some/name": {"tag": top}}


@pytest.mark.parametrize("compression", ["gzip", "zstd"])
def test_oci_layout_is_addressed_by_content(
    packed: tuple[bytes, list[Layer]],
    tmp_path: Path,
    compression: str,
) -> None:
    config, layers = packed
    layout = tmp_path / "layout"
    write_oci_layout(layout, "name:tag", config, layers, "gzip" if compression == "gzip" else "zstd")
    for blob in (layout / "blobs/sha256").iterdir():
        assert sha256(blob.read_bytes()) == blob.name
    (entry,) = json.loads((layout / "index.json").read_bytes())["manifests"]
    assert entry["annotations"]["io.containerd.image.name"] == "docker.io/library/name:tag"
    assert entry["annotations"]["org.opencontainers.image.ref.name"] == "tag"
    manifest = json.loads((layout / "blobs" / entry["digest"].replace(":", "/")).read_bytes())
    for descriptor in (manifest["config"], *manifest["layers"]):
        assert (layout / "blobs" / descriptor["digest"].replace(":", "/")).stat().st_size == descriptor["size"]
    assert {d["mediaType"].rpartition("+")[2] for d in manifest["layers"]} == {compression}
    history = json.loads(config)["history"]
    assert len([step for step in history if not step.get("empty_layer")]) == len(layers)


def test_publish_leaves_nothing_when_the_work_fails(tmp_path: Path) -> None:
    def work(fail: bool) -> None:
        with publish(tmp_path / "final") as directory:
            (directory / "half").touch()
            if fail:
                raise FixtureError("half way")

    with pytest.raises(FixtureError, match="half way"):
        work(fail=True)
    assert list(tmp_path.iterdir()) == []
    work(fail=False)
    assert list(tmp_path.iterdir()) == [tmp_path / "final"]


def test_a_key_depends_on_meaning_not_on_comments(tmp_path: Path) -> None:
    def of(text: str) -> bytes:
        (tmp_path / "recipe.py").write_text(text)
        return meaning(tmp_path / "recipe.py")

    assert of('"""Doc."""\nx = (1,  2)  # why\n') == of("x = (1, 2)\n")
    assert of("x = (1, 2)\n") != of("x = (1, 3)\n")


def test_what_is_not_built_is_said_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(FixtureError, match="python is not built"):
        image_path("python", cache=tmp_path)
    with pytest.raises(FixtureError, match="no image 'perl'"):
        build("perl", cache=tmp_path)
    with pytest.raises(FixtureError, match="no format 'zip'"):
        image_path("python", "zip", cache=tmp_path)
    assert main(["path", "dind", "oci-zstd", "--cache", str(tmp_path)]) == 1
    assert "run `python -m fixtures build dind`" in capsys.readouterr().err


def test_an_ordinary_user_is_told_who_can_build() -> None:
    if os.geteuid() != 0:
        with pytest.raises(FixtureError, match="takes root"):
            build("python", cache=Path("/nonexistent"))
        return
    # As root: in a child that is nobody, since uids are the process's; pytest's directories are closed to it.
    child = os.fork()
    if child == 0:
        code = 1
        try:
            os.setgroups([])
            os.setresgid(65534, 65534, 65534)
            os.setresuid(65534, 65534, 65534)
            build("python", cache=Path("/nonexistent"))
        except FixtureError as error:
            code = 0 if "takes root" in str(error) else 2
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_prune_removes_what_the_present_recipes_do_not_make(tmp_path: Path) -> None:
    kept = [tmp_path / f"images/dind-{image_key('dind')}", tmp_path / f"stages/base-{stage_key('base')}"]
    old = [tmp_path / "images/dind-0123456789abcdef", tmp_path / "stages/.base-0123.killed"]
    for directory in (*kept, *old):
        directory.mkdir(parents=True)
    assert sorted(prune(tmp_path)) == sorted(old)
    assert [path for path in (*kept, *old) if path.exists()] == kept
