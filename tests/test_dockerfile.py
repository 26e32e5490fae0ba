"""The Dockerfile's promises, read from its text: no image can be built where the tests run."""

import json
import re
from dataclasses import dataclass, field
from pathlib import Path

import pytest

TARGETS = ("cpu", "cuda")


@dataclass
class Stage:
    base: str
    instructions: list[tuple[str, str]] = field(default_factory=list)

    def all(self, name: str) -> list[str]:
        return [rest for instruction, rest in self.instructions if instruction == name]


def parse(text: str) -> tuple[dict[str, str], dict[str, Stage]]:
    """The ARGs before the first FROM, and the stages by name."""
    without_comments = "\n".join(line for line in text.splitlines() if not line.startswith("#"))
    joined = re.sub(r"\\\n\s*", "", without_comments)
    arguments: dict[str, str] = {}
    stages: dict[str, Stage] = {}
    stage: Stage | None = None
    for line in joined.splitlines():
        if not line.strip():
            continue
        instruction, _, rest = line.partition(" ")
        if instruction == "FROM":
            base, as_, name = rest.split()
            assert as_ == "AS"
            stage = stages[name] = Stage(base)
        elif stage is None:
            assert instruction == "ARG", line
            name, _, default = rest.partition("=")
            arguments[name] = default
        else:
            stage.instructions.append((instruction, rest))
    return arguments, stages


@pytest.fixture(scope="module")
def dockerfile(repo_root: Path) -> tuple[dict[str, str], dict[str, Stage]]:
    return parse((repo_root / "Dockerfile").read_text())


def test_stages(dockerfile: tuple[dict[str, str], dict[str, Stage]]) -> None:
    arguments, stages = dockerfile
    assert set(stages) == {"wheel", *TARGETS}
    for stage in stages.values():
        match = re.fullmatch(r"\$\{(\w+)\}", stage.base)
        assert match, f"{stage.base}: a base image is an argument, so that a mirror can replace it"
        assert re.fullmatch(r"[a-z/]+:[\w.-]+", arguments[match[1]]), "a name and a tag, no host"


@pytest.mark.parametrize("target", TARGETS)
def test_target_serves_unprivileged_and_tells_its_health(
    dockerfile: tuple[dict[str, str], dict[str, Stage]], target: str
) -> None:
    stage = dockerfile[1][target]
    assert stage.all("USER")[-1] not in ("root", "0")
    (health,) = stage.all("HEALTHCHECK")
    assert "/health" in health
    (entrypoint,) = stage.all("ENTRYPOINT")
    assert json.loads(entrypoint)[:2] == ["vllm_thunder", "serve"]
    port = json.loads(entrypoint)[-1]
    assert stage.all("EXPOSE") == [port]
    assert f":{port}/health" in health


@pytest.mark.parametrize("target", TARGETS)
def test_target_bakes_the_fork_before_it_drops_privileges(
    dockerfile: tuple[dict[str, str], dict[str, Stage]], target: str
) -> None:
    instructions = dockerfile[1][target].instructions
    baked = [i for i, (_, rest) in enumerate(instructions) if rest.endswith("&& scripts/bake.sh")]
    dropped = [i for i, (name, _) in enumerate(instructions) if name == "USER"]
    assert len(baked) == len(dropped) == 1
    assert baked[0] < dropped[0]


def test_what_is_copied_exists(
    repo_root: Path, dockerfile: tuple[dict[str, str], dict[str, Stage]]
) -> None:
    for stage in dockerfile[1].values():
        for rest in stage.all("COPY"):
            if rest.startswith("--from="):
                continue
            for source in rest.split()[:-1]:
                assert (repo_root / source).exists(), source


def test_the_cpu_target_installs_in_the_order_of_the_script(
    repo_root: Path, dockerfile: tuple[dict[str, str], dict[str, Stage]]
) -> None:
    """One fact in two places: the script and the image may not drift apart."""
    script = (repo_root / "scripts" / "env.sh").read_text()
    in_script = re.findall(r"-r (\S+\.lock)", script)
    in_image = re.findall(r"-r requirements/(\S+)", " ".join(dockerfile[1]["cpu"].all("RUN")))
    assert in_image == [name for name in in_script if name != "dev.lock"]
