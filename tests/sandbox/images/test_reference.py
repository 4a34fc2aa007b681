"""Names of images."""

import pytest

from paddock.errors import ImageError
from paddock.sandbox.images.reference import parse_reference

DIGEST = "sha256:" + "ab" * 32


@pytest.mark.parametrize(
    ("name", "full", "short"),
    [
        ("ubuntu", "docker.io/library/ubuntu:latest", "ubuntu:latest"),
        ("ubuntu:24.04", "docker.io/library/ubuntu:24.04", "ubuntu:24.04"),
        ("docker.io/ubuntu", "docker.io/library/ubuntu:latest", "ubuntu:latest"),
        ("index.docker.io/library/ubuntu", "docker.io/library/ubuntu:latest", "ubuntu:latest"),
        ("owner/name", "docker.io/owner/name:latest", "owner/name:latest"),
        ("ghcr.io/a/b/c:v1", "ghcr.io/a/b/c:v1", "ghcr.io/a/b/c:v1"),
        ("localhost/x", "localhost/x:latest", "localhost/x:latest"),
        ("localhost:5000/x:1", "localhost:5000/x:1", "localhost:5000/x:1"),
        ("[::1]:5000/x", "[::1]:5000/x:latest", "[::1]:5000/x:latest"),
        ("registry:5000/x", "registry:5000/x:latest", "registry:5000/x:latest"),
        (f"ubuntu@{DIGEST}", f"docker.io/library/ubuntu@{DIGEST}", f"ubuntu@{DIGEST}"),
        (f"ubuntu:24.04@{DIGEST}", f"docker.io/library/ubuntu@{DIGEST}", f"ubuntu@{DIGEST}"),
        ("a__b-c.d", "docker.io/library/a__b-c.d:latest", "a__b-c.d:latest"),
    ],
)
def test_a_name_has_one_full_form(name: str, full: str, short: str) -> None:
    reference = parse_reference(name)
    assert (str(reference), reference.short) == (full, short)
    assert parse_reference(full) == parse_reference(short)


@pytest.mark.parametrize(
    "name",
    [
        "",
        "Ubuntu",
        "a//b",
        "../x",
        "a/../b",
        "/x",
        "x:",
        "x:a b",
        "x@sha256:12",
        "x@md5:1",
        "-x",
        "http://x/y",
        "x y",
    ],
)
def test_other_names_are_refused(name: str) -> None:
    with pytest.raises(ImageError, match="not the name of an image") as caught:
        parse_reference(name)
    assert caught.value.hint
