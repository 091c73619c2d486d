"""scripts/install.sh installs each lock once, over pip's indexes, and starts again after a kill.

A shell script that notes its calls stands for Python and uv, so nothing is installed.
"""

import os
import platform
import re
import shutil
import subprocess
from importlib import metadata
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FILES = ("scripts/install.sh", "requirements/cpu.lock", "requirements/kernels.lock", "pyproject.toml")
PYTHON = """#!/usr/bin/env bash
echo "python $*" >>"$CALLS"
case "$*" in
    -V) echo Python 3.11.0 ;;
    -) echo --find-links; echo /some/wheels ;;
    "-m venv --clear "*)
        rm -rf "$4"; mkdir -p "$4/bin"; touch "$4/pyvenv.cfg"; cp "$0" "$4/bin/python"; cp "$UV" "$4/bin/uv" ;;
esac
"""
UV = """#!/usr/bin/env bash
echo "uv $*" >>"$CALLS"
case "$*" in *"${KILLED_AT:-nothing}") kill -9 $$ ;; esac
"""

pytestmark = pytest.mark.skipif(
    (platform.system(), platform.machine()) != ("Linux", "x86_64"), reason="the locks are for Linux on x86-64"
)


@pytest.fixture
def install(tmp_path):
    """A function that calls a copy of the script and gives its exit code and the calls it made, by their last word."""
    for file in FILES:
        (tmp_path / file).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / file, tmp_path / file)
    for name, text in (("fake-python", PYTHON), ("fake-uv", UV)):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    calls = tmp_path / "calls"

    def call(*words: str, **changes: str) -> tuple[int, list[str]]:
        calls.write_text("")
        fakes = {"PYTHON": str(tmp_path / "fake-python"), "UV": str(tmp_path / "fake-uv"), "CALLS": str(calls)}
        command = [tmp_path / "scripts/install.sh", tmp_path / "venv", *words]
        done = subprocess.run(command, env=os.environ | fakes | changes, capture_output=True, timeout=60)
        steps = re.findall(r"^(?:uv .*/(\w+\.lock)|python -m (venv) .*)$", calls.read_text(), flags=re.M)
        return done.returncode, ["".join(step) for step in steps]

    return call


def test_each_set_is_installed_once_and_the_smaller_one_leaves_the_larger_alone(install, tmp_path):
    assert install() == (0, ["venv", "cpu.lock"])
    assert install() == (0, [])
    assert install("kernels") == (0, ["kernels.lock"])
    assert install("kernels") == install() == (0, [])
    with (tmp_path / "requirements/kernels.lock").open("a") as lock:
        lock.write("more==1\n")
    assert install() == (0, [])
    assert install("kernels") == (0, ["kernels.lock"])


def test_both_sets_are_installed_by_one_call(install):
    assert install("kernels") == (0, ["venv", "cpu.lock", "kernels.lock"])
    assert install("kernels") == (0, [])


def test_each_lock_is_installed_without_dependencies_from_where_pip_is_told_to_look(install, tmp_path):
    install("kernels")
    calls = [line for line in (tmp_path / "calls").read_text().splitlines() if line.startswith("uv ")]
    assert len(calls) == 2
    assert all("--no-deps" in call and "--find-links /some/wheels" in call for call in calls)


@pytest.mark.parametrize("lock", ["cpu.lock", "kernels.lock"])
@pytest.mark.parametrize("then", [(), ("kernels",)], ids=["cpu", "kernels"])
def test_a_killed_install_is_started_again_whatever_is_asked_for_next(install, lock, then):
    if lock == "kernels.lock":
        assert install() == (0, ["venv", "cpu.lock"])
    status, _ = install("kernels", KILLED_AT=lock)
    assert status != 0
    assert install(*then) == (0, ["venv", "cpu.lock", *(f"{name}.lock" for name in then)])


def test_another_word_is_refused(install):
    assert install("kernel") == (1, [])


def test_what_the_locked_packages_of_the_kernels_require_is_locked():
    locked = "".join((ROOT / file).read_text() for file in FILES if file.endswith(".lock"))
    names = {name.lower() for name in re.findall(r"^([\w.-]+)==", locked, flags=re.M)}
    for name in re.findall(r"^([\w.-]+)==", (ROOT / "requirements/kernels.lock").read_text(), flags=re.M):
        required = {re.split(r"[^\w.-]", line)[0].lower() for line in metadata.requires(name) or () if ";" not in line}
        assert required <= names, name
