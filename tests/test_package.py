"""What is built and released: the files of the wheel and of the sdist, the versions, and the workflow."""

import re
import subprocess
import tomllib
from pathlib import Path

import pytest
import yaml

import scanl

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
CITATION = yaml.safe_load((ROOT / "CITATION.cff").read_text("utf-8"))
WORKFLOW = yaml.safe_load((ROOT / ".github" / "workflows" / "ci.yml").read_text("utf-8"))
MAKEFILE = (ROOT / "Makefile").read_text("utf-8")


def tracked():
    """The files that git knows, relative to the project."""
    done = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True)
    if done.returncode != 0:
        pytest.skip("git does not know this folder")
    return [path for path in map(Path, done.stdout.splitlines()) if (ROOT / path).exists()]


def test_versions_agree():
    assert PROJECT["project"]["version"] == scanl.__version__ == CITATION["version"]


def test_the_citation_is_of_this_project():
    assert (CITATION["title"], CITATION["license"]) == (PROJECT["project"]["name"], PROJECT["project"]["license"])
    assert CITATION.keys() >= {"cff-version", "message", "authors", "type"}


def test_the_wheel_has_every_file_of_the_package():
    patterns = PROJECT["tool"]["setuptools"]["package-data"]["scanl"]
    package = Path("src", "scanl")
    others = [path.relative_to(package) for path in tracked() if package in path.parents and path.suffix != ".py"]
    assert len(others) > 60
    missing = [path for path in others if not any(path.match(pattern) for pattern in patterns)]
    assert not missing, "add them to package-data of pyproject.toml"


def test_the_sdist_has_every_file(monkeypatch):
    """MANIFEST.in, read by setuptools; what a build adds by itself is the package, its licence and its page."""
    egg_info = pytest.importorskip("setuptools.command.egg_info", reason="setuptools is not installed")
    monkeypatch.chdir(ROOT)
    files = egg_info.FileList()
    for line in (ROOT / "MANIFEST.in").read_text("utf-8").splitlines():
        if line and not line.startswith("#"):
            files.process_template_line(line)
    added = {Path("README.md"), Path("LICENSE"), Path("pyproject.toml"), Path("MANIFEST.in"), Path(".gitignore")}
    known = added | {Path(file) for file in files.files}
    assert not [path for path in tracked() if path not in known and path.parts[0] != "src"]


def test_the_first_screen_of_the_readme_sets_everything_up():
    """By two commands, each with its minutes, which are targets of the Makefile."""
    screen = (ROOT / "README.md").read_text("utf-8").splitlines()[:20]
    for target in ("demo", "test"):
        (line,) = (line for line in screen if line.startswith(f"make {target} "))
        assert re.search(r"about \d+ minutes$", line)
        assert re.search(rf"^{target}:", MAKEFILE, re.MULTILINE)


def steps():
    return [step for job in WORKFLOW["jobs"].values() for step in job["steps"]]


def test_the_workflow_tries_three_systems_and_every_python():
    matrix = WORKFLOW["jobs"]["wheel"]["strategy"]["matrix"]
    assert {system.split("-")[0] for system in matrix["os"]} == {"ubuntu", "macos", "windows"}
    assert matrix["python"] == ["3.11", "3.12", "3.13", "3.14"]
    assert PROJECT["project"]["requires-python"] == f">={matrix['python'][0]}"


def test_the_workflow_runs_what_there_is():
    commands = "\n".join(step["run"] for step in steps() if "run" in step)
    for target in re.findall(r"make (\w+)", commands + (ROOT / ".ci" / "run").read_text("utf-8")):
        assert re.search(rf"^{target}:", MAKEFILE, re.MULTILINE), target
    scripts = re.findall(r"[\w./]+\.py|\.ci/run", commands)
    assert scripts
    assert all((ROOT / script).is_file() for script in scripts)
    assert WORKFLOW["permissions"] == {"contents": "read"}


def test_templates_of_issues_are_forms():
    for path in (ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml"):
        form = yaml.safe_load(path.read_text("utf-8"))
        if path.stem != "config":
            assert form.keys() >= {"name", "description", "body"}, path.name
            assert len({part["id"] for part in form["body"]}) == len(form["body"])


def test_the_dependencies_have_a_lowest_version():
    lines = [line for group in PROJECT["project"]["optional-dependencies"].values() for line in group]
    for line in [*PROJECT["project"]["dependencies"], *lines]:
        assert line.startswith("scanl[") or ">=" in line, line
