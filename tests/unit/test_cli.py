import subprocess
import sys
import types
from pathlib import Path

import pytest

from tba_megatron.cli import main as cli
from tba_megatron.config_load import load_config
from tba_megatron.errors import RoleFailedError

ROOT = Path(__file__).parents[2]
QUICKSTART = str(ROOT / "configs" / "quickstart.yaml")
HEAVY = ("torch", "transformers", "vllm", "megatron", "tensorboard", "zmq")


def heavy_modules(*argv):
    """Which heavy libraries a command has imported by its end."""
    code = (
        "import sys; from tba_megatron.cli.main import main\n"
        "try: main(sys.argv[1:])\n"
        f"finally: print('HEAVY', [m for m in {HEAVY} if m in sys.modules])"
    )
    answer = subprocess.run([sys.executable, "-c", code, *argv], capture_output=True, text=True, cwd=ROOT, check=False)
    assert "Traceback" not in answer.stderr
    return answer.stdout.rpartition("HEAVY ")[2].strip()


def command(monkeypatch, name, run):
    """Put a command in the place of the real one."""
    module = types.ModuleType(f"tba_megatron.cli.{name}")
    module.run = run
    monkeypatch.setitem(sys.modules, module.__name__, module)


@pytest.mark.parametrize("argv", [["--help"], ["train", "--help"], ["config", QUICKSTART]])
def test_help_and_config_answer_without_heavy_imports(argv):
    assert heavy_modules(*argv) == "[]"


COMMAND_MODULES = sorted(path.stem for path in (ROOT / "tba_megatron" / "cli").glob("*.py") if path.stem != "__init__")


@pytest.mark.parametrize("module", [*(f"cli.{name}" for name in COMMAND_MODULES), "search.searcher"])
def test_a_command_imports_no_torch_before_it_has_set_how_many_threads_torch_may_use(module):
    # libgomp reads OMP_NUM_THREADS when it is loaded: with more threads than cores, they spin for each other.
    code = f"import sys, tba_megatron.{module}; print([m for m in {HEAVY[:4]} if m in sys.modules])"
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True)
    assert answer.stdout.strip() == "[]"


def test_config_prints_the_resolved_tree(capsys, tmp_path):
    assert cli.main(["config", QUICKSTART, "trainer.steps=7"]) == 0
    printed = tmp_path / "printed.yaml"
    printed.write_text(capsys.readouterr().out)
    assert load_config(printed) == load_config(QUICKSTART, ["trainer.steps=7"])


def test_a_bad_configuration_ends_with_exit_code_2_and_one_line_a_problem(capsys):
    assert cli.main(["train", QUICKSTART, "trainer.setps=7", "run.seed=x"]) == 2
    output = capsys.readouterr()
    assert output.out == ""
    assert [line.split(": ")[0] for line in output.err.splitlines()] == [
        "override 'run.seed=x'",
        "override 'trainer.setps=7'",
    ]


@pytest.mark.parametrize("argv", [[], ["train"], ["dance", QUICKSTART], ["train", QUICKSTART, "--steps"]])
def test_a_wrong_command_line_ends_with_exit_code_2(argv, capsys):
    with pytest.raises(SystemExit) as caught:
        cli.main(argv)
    assert caught.value.code == 2
    assert "usage: tba" in capsys.readouterr().err


@pytest.mark.parametrize("name", cli.COMMANDS)
def test_each_command_runs_its_own_module_and_returns_its_exit_code(name, monkeypatch):
    seen = []

    def run(config, args):
        seen.append((config.run.seed, args.command))
        return 3

    command(monkeypatch, name, run)
    assert cli.main([name, QUICKSTART, "run.seed=5"]) == 3
    assert seen == [(5, name)]


def test_an_error_that_users_can_meet_is_its_message_and_exit_code(monkeypatch, capsys):
    def run(config, args):
        raise RoleFailedError("searcher 0 ended with exit code 9")

    command(monkeypatch, "launch", run)
    assert cli.main(["launch", QUICKSTART]) == 1
    assert capsys.readouterr().err == "searcher 0 ended with exit code 9\n"


def test_an_interrupt_is_exit_code_130(monkeypatch):
    def run(config, args):
        raise KeyboardInterrupt

    command(monkeypatch, "sft", run)
    assert cli.main(["sft", QUICKSTART]) == 130


def test_any_other_exception_keeps_its_traceback(monkeypatch):
    def run(config, args):
        raise ZeroDivisionError

    command(monkeypatch, "eval", run)
    with pytest.raises(ZeroDivisionError):
        cli.main(["eval", QUICKSTART])


def test_the_module_runs_as_a_program():
    answer = subprocess.run(
        [sys.executable, "-m", "tba_megatron.cli.main", "config", "no/such.yaml"],
        capture_output=True,
        text=True,
        cwd=ROOT,
        check=False,
    )
    assert (answer.returncode, answer.stderr) == (2, "no/such.yaml: No such file or directory\n")
