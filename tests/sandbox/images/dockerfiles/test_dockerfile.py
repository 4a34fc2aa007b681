from pathlib import PurePosixPath

import pytest

from paddock.errors import ImageError
from paddock.sandbox.images.dockerfiles.dockerfile import parse_dockerfile, parse_mounts
from paddock.sandbox.images.dockerfiles.scope import CHANGES, BuildInputs, BuildScope, read_global_args
from paddock.sandbox.images.image import ImageConfig


def read_stage(body: str, *, before: str = "", config: ImageConfig | None = None, **build_args: str) -> BuildScope:
    """The scope at the end of a stage."""
    dockerfile = parse_dockerfile(f"{before}\nFROM base\n{body}")
    inputs = BuildInputs(build_args)
    global_args = read_global_args(dockerfile.global_args, inputs, dockerfile.escape)
    scope = BuildScope(inputs, global_args, dockerfile.escape, config or ImageConfig())
    for instruction in dockerfile.stages[0].instructions:
        if instruction.keyword in CHANGES:
            scope = scope.apply(instruction)
    return scope


# -- stages -------------------------------------------------------------------------------------------


def test_stages_are_found_by_name_and_number_before_the_place_of_use() -> None:
    dockerfile = parse_dockerfile(
        "ARG V=1\nFROM a:$V AS Build\nRUN x\nFROM --platform=linux/amd64 b@sha256:0\nUSER u\n"
    )
    first, second = dockerfile.stages
    assert (first.base, first.name, second.base, second.platform) == ("a:$V", "build", "b@sha256:0", "linux/amd64")
    assert dockerfile.find_stage("BUILD") is first
    assert dockerfile.find_stage("1") is second
    assert dockerfile.find_stage("1", before=1) is None


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("FROM a\nFOO b", "line 2: FOO is not supported"),
        ("FROM a\nONBUILD RUN b", "line 2: ONBUILD is not supported"),
        ("FROM a\nSTOPSIGNAL 9", "line 2: STOPSIGNAL is not supported"),
        ("FROM a\nCOPY --parents a b", "line 2: COPY --parents is not supported"),
        ("FROM a\nADD --from=x a b", "line 2: ADD --from is not supported"),
        ("FROM a\n\nRUN --security=insecure ls", "line 3: RUN --security is not supported"),
        ("FROM a\nRUN --mount=type=secret,id=x ls", "line 2: RUN --mount=type=secret is not supported"),
        ("FROM a\nRUN --mount=type=cache ls", "line 2: RUN --mount has no target"),
        ("FROM a\nRUN --mount=type=cache,target=/x,colour=red ls", "line 2: .* no option 'colour'"),
        ("FROM a\nRUN --mount=type=cache,uid=me,target=/x ls", "line 2: RUN --mount has uid=me"),
        ("FROM a\nRUN --mount=type=cache,mode=rwx,target=/x ls", "line 2: RUN --mount has mode=rwx"),
        ("FROM a\nRUN --mount=type=tmpfs,target=/x ls", "line 2: RUN --mount=type=tmpfs is not supported"),
        ("FROM a\nRUN --network=none ls", "line 2: RUN --network is not supported"),
        ("FROM a\nMAINTAINER me", "line 2: MAINTAINER is not supported"),
        ("FROM a\nCOPY --link a b", "line 2: COPY --link is not supported"),
        ("FROM a\nCOPY --exclude=x a b", "line 2: COPY --exclude is not supported"),
        ("FROM a\nADD --checksum=sha256:0 a b", "line 2: ADD --checksum is not supported"),
        ("FROM a\nADD --keep-git-dir=true a b", "line 2: ADD --keep-git-dir is not supported"),
        ("FROM a\nCOPY --chown a b", "line 2: --chown has no value"),
        ("FROM a\nCOPY a", "line 2: COPY has no destination"),
        ("FROM a\nWORKDIR", "line 2: WORKDIR has no arguments"),
        ("RUN a", "line 1: RUN comes before FROM"),
        ("ARG a", "line 1: there is no FROM"),
        ("FROM a b", "line 1: FROM has the wrong number of words"),
        ("FROM a AS x\nFROM b AS X", "line 2: there are two stages 'x'"),
        ("FROM a AS ..", "line 1: '..' is no name of a stage"),
        ("FROM a\nRUN b\nADD https://example.org/x /x", "line 3: ADD of https://example.org/x is not supported"),
        ("FROM a\nCOPY 'git@example.org:x.git' /x", "line 2: COPY of git@example.org:x.git is not supported"),
        ("FROM a\nRUN --mount=type=cache,target=/c,sharing=some ls", "line 2: RUN --mount has sharing=some"),
    ],
)
def test_what_is_not_supported_is_refused_with_its_line(text: str, message: str) -> None:
    with pytest.raises(ImageError, match=message) as caught:
        parse_dockerfile(text)
    assert caught.value.hint
    assert (caught.value.data.get("fault") == "not-supported") == ("is not supported" in caught.value.message)


def test_mounts_of_a_run() -> None:
    (stage,) = parse_dockerfile(
        "FROM a\nRUN --mount=type=cache,target=/c,id=i --mount=source=s,dst=/d,rw,from=x "
        "--mount=target=/e,readonly ls"
    ).stages
    cache, bind, read_only = parse_mounts(stage.instructions[0])
    assert (cache.kind, cache.target, cache.options["id"]) == ("cache", "/c", "i")
    assert (bind.kind, bind.source, bind.target, bind.is_set("rw")) == ("bind", "s", "/d", True)
    assert (read_only.kind, read_only.is_set("rw")) == ("bind", False)


# -- variables ----------------------------------------------------------------------------------------


def test_env_in_both_forms() -> None:
    env = read_stage('ENV a=1 b="two words" c=x\\ y\nENV old  the  rest $a\nENV d=$a$b').config.env
    assert env == {"a": "1", "b": "two words", "c": "x y", "old": "the  rest 1", "d": "1two words"}


def test_values_of_one_env_see_the_variables_before_it() -> None:
    assert read_stage("ENV a=old\nENV a=new b=$a").config.env == {"a": "new", "b": "old"}


@pytest.mark.parametrize(
    ("before", "body", "build_args", "expected"),
    [
        ("ARG v=1", "ARG v", {}, "1"),
        ("ARG v=1", "ARG v=2", {}, "2"),
        ("ARG v=1", "ARG v=2", {"v": "3"}, "3"),
        ("ARG v=1", "", {}, None),
        ("", "ARG v=${w:-d}", {}, "d"),
        ("", "ARG w=1\nARG v=$w$w", {}, "11"),
        ("ARG w=5\nARG v=${w}0", "ARG v", {"w": "6"}, "60"),
        ("", "ENV v=env\nARG v=arg", {"v": "given"}, "env"),
    ],
)
def test_scopes_of_arg(before: str, body: str, build_args: dict[str, str], expected: str | None) -> None:
    assert read_stage(body, before=before, **build_args).variables.get("v") == expected


def test_predefined_arguments() -> None:
    scope = read_stage("ARG TARGETARCH\nARG TARGETPLATFORM", HTTP_PROXY="http://proxy", undeclared="x")
    assert scope.variables == {"TARGETARCH": "amd64", "TARGETPLATFORM": "linux/amd64"}
    assert scope.step_env == {**scope.variables, "HTTP_PROXY": "http://proxy"}


# -- config -------------------------------------------------------------------------------------------


def test_every_instruction_that_changes_the_config() -> None:
    config = read_stage(
        """
ENV top=/srv
WORKDIR $top
WORKDIR app/../lib
USER me:them
SHELL ["/bin/bash", "-c"]
LABEL a="b c" version=1
EXPOSE 80 53/udp 80/tcp
VOLUME /data "/with space"
VOLUME ["/json"]
ENTRYPOINT ["run"]
CMD serve $top
HEALTHCHECK --interval=1m30s --timeout=500ms --start-period=5s --start-interval=1s --retries=2 CMD curl localhost
"""
    ).config
    assert config.workdir == PurePosixPath("/srv/lib")
    assert config.user == "me:them"
    assert config.labels == {"a": "b c", "version": "1"}
    assert config.exposed_ports == ("80/tcp", "53/udp")
    assert config.volumes == ("/data", "/with space", "/json")
    assert (config.entrypoint, config.cmd) == (("run",), ("/bin/bash", "-c", "serve $top"))
    check = config.health_check
    assert check is not None
    assert (check.argv, check.interval, check.timeout) == (("/bin/bash", "-c", "curl localhost"), 90.0, 0.5)
    assert (check.start_period, check.start_interval, check.retries) == (5.0, 1.0, 2)


def test_an_entrypoint_drops_the_command_of_the_base_only() -> None:
    base = ImageConfig(cmd=("bash",))
    assert read_stage('ENTRYPOINT ["a"]', config=base).config.cmd == ()
    assert read_stage('CMD ["b"]\nENTRYPOINT ["a"]', config=base).config.cmd == ("b",)


def test_healthcheck_none_removes_that_of_the_base() -> None:
    assert read_stage("HEALTHCHECK CMD true\nHEALTHCHECK NONE").config.health_check is None


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("SHELL /bin/sh", "SHELL is no list"),
        ("EXPOSE eighty", "EXPOSE has 'eighty'"),
        ("EXPOSE 80-65536", "EXPOSE has '80-65536'"),
        ("ENV a", "ENV a has no value"),
        ("ENV a=1 b", "ENV has 'b'"),
        ("LABEL =x", "LABEL has '=x'"),
        ("ARG =x", "ARG has '=x'"),
        ("USER a b", "USER is 'a b'"),
        ("WORKDIR $missing", "WORKDIR is empty"),
        ("HEALTHCHECK --interval=5 CMD true", "--interval is '5'"),
        ("HEALTHCHECK --retries=x CMD true", "--retries is 'x'"),
        ("HEALTHCHECK SOMETIMES true", "HEALTHCHECK SOMETIMES"),
    ],
)
def test_wrong_arguments_are_refused_with_their_line(body: str, message: str) -> None:
    with pytest.raises(ImageError, match=f"line 3: {message}"):
        read_stage(body)
