import subprocess
import sys

import pytest

from vllm_thunder.cli import main as cli
from vllm_thunder.program.errors import PatchError
from vllm_thunder.version import VLLM_VERSION, __version__


def run(*arguments: str) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "vllm_thunder", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


def test_version_works_whatever_vllms_distribution_is_called():
    result = run("--version")
    assert result.returncode == 0
    assert f"vllm_thunder {__version__} for vLLM {VLLM_VERSION}" in result.stdout
    assert f" {VLLM_VERSION}" in result.stdout.partition("(")[2]


def test_version_without_vllm(monkeypatch, capsys):
    def missing(name):
        raise cli.importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(cli.importlib.metadata, "version", missing)
    with pytest.raises(SystemExit) as caught:
        cli.main(["--version"])
    assert caught.value.code == 0
    assert "(none is installed)" in capsys.readouterr().out


def test_help_lists_the_commands(capsys):
    with pytest.raises(SystemExit) as caught:
        cli.main(["--help"])
    assert caught.value.code == 0
    text = capsys.readouterr().out
    for command in ("serve", "patches", "demo"):
        assert f"\n    {command} " in text


def test_no_arguments_print_the_help(capsys):
    assert cli.main([]) == 2
    assert "COMMAND" in capsys.readouterr().out


@pytest.mark.parametrize("arguments", [["bogus"], ["--bogus"], ["--", "serve"], ["-x", "patches"]])
def test_what_is_no_command_is_refused(arguments, capsys):
    with pytest.raises(SystemExit) as caught:
        cli.main(arguments)
    assert caught.value.code == 2
    assert "vllm_thunder: error:" in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [["--help"], ["patches", "--help"], ["demo", "--help"]])
def test_only_serve_imports_vllm(arguments):
    code = (
        "import sys\n"
        "from vllm_thunder.cli.main import main\n"
        f"try: main({arguments!r})\n"
        "except SystemExit as exit: assert exit.code == 0, exit\n"
        "loaded = {name.partition('.')[0] for name in sys.modules} & {'vllm', 'torch'}\n"
        "sys.exit(f'loaded {loaded}' if loaded else 0)\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60
    )
    assert result.returncode == 0, result.stderr


def test_a_command_gets_its_arguments_and_gives_the_exit_code(monkeypatch):
    from vllm_thunder.cli import patches

    seen = []
    monkeypatch.setattr(patches, "run", lambda args: seen.append(args.action) or 1)
    assert cli.main(["patches", "list"]) == 1
    assert seen == ["list"]


def test_an_error_of_ours_is_one_line(monkeypatch, capsys):
    from vllm_thunder.cli import patches

    def fail(args):
        raise PatchError("core.py: changed")

    monkeypatch.setattr(patches, "run", fail)
    assert cli.main(["patches", "check"]) == 1
    assert capsys.readouterr().err == "vllm_thunder: error: core.py: changed\n"
