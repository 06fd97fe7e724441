"""The README and the documentation are correct: commands, flags, links and examples exist and run."""

import re
import shlex
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest
from typer.testing import CliRunner

from appliance.cli.app import app

REPOSITORY = Path(__file__).resolve().parents[2]
PAGES = [REPOSITORY / "README.md", *sorted((REPOSITORY / "docs").rglob("*.md"))]
LINKS = REPOSITORY / ".ci/links.py"
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)


def name(page: Path) -> str:
    return page.relative_to(REPOSITORY).as_posix()


def blocks(page: Path, language: str) -> list[str]:
    return [text for kind, text in BLOCK.findall(page.read_text("utf-8")) if kind == language]


def commands(page: Path) -> list[list[str]]:
    """Every shell command of the page's console blocks (continued lines joined), and of its `inline code`."""
    text = "".join(blocks(page, "console")).replace("\\\n", " ")
    lines = [line.removeprefix("$ ") for line in text.splitlines() if line.startswith("$ ")]
    prose = BLOCK.sub("", page.read_text("utf-8"))
    programs = ("make ", "atoll ", ".venv/bin/atoll ", "sudo atoll ", "sudo make ")
    lines += [code for code in re.findall(r"`([^`\n]+)`", prose) if code.startswith(programs)]
    return [shlex.split(line.removeprefix("sudo "), comments=True) for line in lines]


@cache
def help_of(*command: str) -> str:
    """In this process, if it can be: to start a program for each takes most of these tests' time."""
    if command[:1] in (("serve",), ("engine",), ("gateway",)):  # they parse their flags themselves
        own = subprocess.run(
            [sys.executable, "-m", "appliance.cli", *command, "--help"], capture_output=True, text=True, cwd=REPOSITORY
        )
        assert own.returncode == 0, f"atoll {' '.join(command)}: {own.stderr}"
        return own.stdout
    result = CliRunner(env={"COLUMNS": "120", "TERM": "dumb"}).invoke(app, [*command, "--help"])
    assert result.exit_code == 0, f"atoll {' '.join(command)}: {result.output}"
    return result.stdout


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_make_targets_exist(page: Path):
    targets = set(re.findall(r"^([a-z-]+):", (REPOSITORY / "Makefile").read_text(), re.MULTILINE))
    used = {word for words in commands(page) if words[0] == "make" for word in words[1:] if "=" not in word}
    assert used <= targets


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_atoll_commands_and_flags_exist(page: Path):
    for words in commands(page):
        if Path(words[0]).name != "atoll" or len(words) == 1:
            continue
        groups = ("bundle", "keys", "apikey", "tls", "answers", "journal", "trust", "audit", "checklist", "jobs",
                  "presets", "pilot", "bench", "models")
        command = words[1:3] if words[1] in groups else [words[1]]
        text = help_of(*(word for word in command if re.fullmatch(r"[a-z][a-z-]*", word)))
        for flag in (word.partition("=")[0] for word in words if word.startswith("--")):
            assert re.search(rf"{re.escape(flag)}\b", text), f"atoll {' '.join(command)} has no {flag}"


@pytest.mark.parametrize("page", [p for p in PAGES if p.name == "serve.md" or p.name == "README.md"], ids=name)
def test_serve_flags_named_in_prose_exist(page: Path):
    rows = re.findall(r"^\| (`--.*?) \|", page.read_text("utf-8"), re.MULTILINE)
    for flag in re.findall(r"--[a-z-]+", " ".join(rows)):
        assert flag in help_of("serve"), flag


@cache
def help_of_the_medium() -> str:
    """Of install.sh: its own options, and those that it passes on to `atoll install`."""
    (own,) = (REPOSITORY / "offline_bundle/medium").rglob("arguments.py")
    return own.read_text("utf-8") + help_of("install")


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_flags_of_the_medium_exist(page: Path):
    lines = re.findall(r"^\$? ?(?:sudo )?sh (?:\S*/)?install\.sh .*$", page.read_text("utf-8"), re.MULTILINE)
    for flag in re.findall(r"--[a-z-]+", " ".join(lines)):
        assert flag in help_of_the_medium(), f"install.sh has no {flag}"


def test_links_and_paths_lead_somewhere():
    result = subprocess.run([sys.executable, LINKS], capture_output=True, text=True)
    assert result.returncode == 0, result.stdout


def test_what_leads_nowhere_is_found(tmp_path: Path):
    for folder in ("docs/en", "docs/performance", "systemd", "engine/core", "tui"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "engine/core/loop.py").touch()
    (tmp_path / "systemd/README.md").write_text("[gone](gone.md)")
    (tmp_path / "docs/en/page.md").write_text("# A page\n\n[good](#a-page) [bad](#another) https://elsewhere")
    (tmp_path / "docs/architecture.md").write_text(
        "| `engine/` | `loop.py` |\n\n`engine/core/loop.py` `engine/core/none.py`\n\n"
        "```text\ncore/loop.py core/gone.py\n```\n"
    )
    (tmp_path / "docs/performance.md").write_text("[found](performance/found.md)")
    (tmp_path / "docs/performance/found.md").touch()
    (tmp_path / "docs/performance/lost.md").touch()
    (tmp_path / "README.md").write_text("nothing")
    result = subprocess.run([sys.executable, LINKS, tmp_path], capture_output=True, text=True)
    assert result.returncode == 1
    assert set(result.stdout.splitlines()) == {
        "README.md: leads nowhere to docs/en/page.md",
        "docs/architecture.md: names engine/core/none.py, which does not exist",
        "docs/architecture.md: names loop.py of engine/, which does not exist",
        "docs/architecture.md: draws core/gone.py, which does not exist",
        "docs/architecture.md: does not name engine/core/",
        "docs/en/page.md: links to #another, which has no such heading",
        "docs/performance.md: leads nowhere to performance/lost.md",
        "systemd/README.md: links to gone.md, which does not exist",
    }


def test_the_sizing_table_is_what_the_planner_says():
    result = subprocess.run(
        [sys.executable, REPOSITORY / ".ci/sizing.py", "--check"], capture_output=True, text=True, cwd=REPOSITORY
    )
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_python_examples_compile(page: Path):
    for example in blocks(page, "python"):
        compile(example, name(page), "exec")


def test_both_languages_say_the_same():
    english, korean = ({path.relative_to(REPOSITORY / "docs" / language).as_posix(): path
                        for path in (REPOSITORY / "docs" / language).rglob("*.md")} for language in ("en", "ko"))
    assert english.keys() == korean.keys()
    for file, path in english.items():
        for language in ("bash", "console", "json", "python"):  # a plain block may hold words, which are translated
            assert blocks(path, language) == blocks(korean[file], language), file
        counts = [len(re.findall(r"^#", p.read_text("utf-8"), re.MULTILINE)) for p in (path, korean[file])]
        assert counts[0] == counts[1], f"{file}: headings differ"


@pytest.mark.parametrize("page", [REPOSITORY / "README.md", REPOSITORY / "docs/en/offline.md"], ids=name)
def test_the_offline_example_runs(page: Path, smollm2_dir: Path):
    example = next(block for block in blocks(page, "python") if "from engine import" in block)
    result = subprocess.run([sys.executable, "-c", example], capture_output=True, text=True, cwd=REPOSITORY)
    assert result.returncode == 0, result.stderr
    assert "Paris" in result.stdout


def test_the_bundle_of_the_readme_can_be_made(tmp_path: Path, smollm2_dir: Path):
    """The publisher's commands, word for word; what comes after them is an interactive install."""
    words = [w for w in commands(REPOSITORY / "README.md") if w[1:2] in (["keys"], ["bundle"]) and len(w) > 3]
    assert [w[1:3] for w in words] == [["keys", "new"], ["bundle", "build"], ["bundle", "verify"]]
    (tmp_path / ".cache").symlink_to(smollm2_dir.parents[1])
    for command in words:
        result = subprocess.run(
            [sys.executable, "-m", "appliance.cli", *command[1:]], capture_output=True, text=True, cwd=tmp_path
        )
        assert result.returncode == 0, result.stderr


GUIDES = [*PAGES, REPOSITORY / "offline_bundle/medium/README.txt"]


@pytest.mark.parametrize("page", [page for page in GUIDES if "sh install.sh" in page.read_text("utf-8")], ids=name)
def test_the_first_command_of_every_guide_compares_the_script(page: Path):
    """install.sh comes from the disk, so it is compared before it runs, and the copy that was compared is what runs."""
    text = page.read_text("utf-8")
    blocks_of = [body for _, body in BLOCK.findall(text)] if page.suffix == ".md" else text.split("\n\n\n")
    guides = [block for block in blocks_of if "sh install.sh" in block]
    if page.name in ("install.md", "medium.md", "README.txt"):
        assert guides
    for block in guides:
        first = next(line for line in block.splitlines() if "install.sh" in line)
        assert re.search(r"cp \S+/install\.sh \. && sha256sum install\.sh", first), first
    assert not re.search(r"sh /media/\S*install\.sh|\./install\.sh", text)  # from the disk, uncompared


def test_no_program_advises_to_run_the_script_from_the_disk():
    rooms = ("appliance", "installer", "offline_bundle")
    sources = [path for room in rooms for path in (REPOSITORY / room).rglob("*.py")]
    assert [path for path in sources if "./install.sh" in path.read_text("utf-8")] == []
