"""Checks of the documentation: settings in commands exist, and links have targets."""

import functools
import pathlib
import re
import runpy
import shlex
from collections.abc import Iterator
from typing import Any

import pytest

from cirag_jax import cli
from cirag_jax.commands import evaluate_retrieval
from cirag_jax.config_files import load_config
from cirag_jax.evaluation import metrics
from cirag_jax.evaluation.scoring import AnsweredQuestion, Scoring
from cirag_jax.types import Prediction, Question

ROOT = pathlib.Path(__file__).resolve().parents[1]
PAGES = sorted(
    path.relative_to(ROOT).as_posix()
    for pattern in ("*.md", "docs/**/*.md", "experiments/*.md", "cirag_jax/shipped/*/README.md")
    for path in ROOT.glob(pattern)
)
EARLIER = "# git checkout "  # first line of a block whose commands need an earlier commit
_FENCED = re.compile(r"^```\w*\n(.*?)^```", re.MULTILINE | re.DOTALL)
_INDENTED = re.compile(r"(?:^ {4}\S.*\n)+", re.MULTILINE)
_LINK = re.compile(r"\]\((?!https?:|mailto:)([^)#\s]*)(#[^)\s]*)?\)")


def commands(page: str) -> Iterator[tuple[str, list[str]]]:
    """Yields the name and arguments of every ``launch/NAME.py`` in a page's code blocks."""
    text = (ROOT / page).read_text("utf-8")
    fenced = [block for block in _FENCED.findall(text) if not block.startswith(EARLIER)]
    blocks = "\n".join([*fenced, *_INDENTED.findall(_FENCED.sub("", text))])
    for line in blocks.replace("\\\n", " ").splitlines():
        found = re.search(r"launch/(\w+)\.py(.*)", line)
        if found:
            # A line may contain several commands; "..." is a placeholder.
            own = re.split(r" && |; |'$", found[2])[0]
            if '="' in line[: found.start()]:  # a variable that later lines use
                own = own.removesuffix('"')
            arguments = shlex.split(own, comments=True)
            yield found[1], [a for a in arguments if a != "..." and not a.startswith("$")]


COMMANDS = [(page, *command) for page in PAGES for command in commands(page)]


@functools.cache
def frame_of(name: str) -> tuple[str, Any]:
    """Returns the default config of a launch script, and the function that extends configs."""
    told: dict[str, Any] = {}

    def run(main: Any, default_config: str, *_: Any, extend: Any = None, **options: Any) -> None:
        told.update(default=default_config, extend=extend)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cli, "run", run)
        runpy.run_path(str(ROOT / "launch" / f"{name}.py"), run_name="__main__")
    return told["default"], told["extend"]


def test_docs_contain_commands():
    assert len(COMMANDS) > 100 and len({name for _, name, _ in COMMANDS}) > 8


@pytest.mark.parametrize("page", sorted({page for page, *_ in COMMANDS}))
def test_docs_settings_exist(page):
    for _, name, arguments in (one for one in COMMANDS if one[0] == page):
        default, extend = frame_of(name)
        if name == "sweep":  # its values are lists
            arguments = [re.sub(r"=\[.*\]$|=.*,.*$", "", argument) for argument in arguments]
            arguments = [a for a in arguments if "=" in a]
        files = [a.removeprefix("--config=") for a in arguments if a.startswith("--config=")]
        overrides = [argument for argument in arguments if argument.startswith("--config.")]
        if "NAME" not in (files or [default])[0]:
            load_config((files or [default])[0], overrides, extend)


def test_docs_metrics_page_has_every_module():
    page = (ROOT / "docs" / "evaluation.md").read_text("utf-8")
    package = ROOT / "cirag_jax"
    files = (package / "evaluation").rglob("*.py")
    modules = [p.relative_to(package).as_posix() for p in files if p.name != "__init__.py"]
    assert len(modules) > 15 and not [name for name in modules if f"`{name}`" not in page]


def test_docs_metrics_page_files_exist():
    page = (ROOT / "docs" / "evaluation.md").read_text("utf-8")
    named = set(re.findall(r"`((?:\w+/)+\w+\.py)`", page))
    places = (ROOT, ROOT / "cirag_jax")
    assert named and not [n for n in named if not any((p / n).is_file() for p in places)]


def test_docs_own_metric_example_works(monkeypatch):
    text = (ROOT / "docs" / "evaluation.md").read_text("utf-8")
    (example,) = re.findall(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    monkeypatch.setattr(metrics, "FAMILIES", dict(metrics.FAMILIES))
    exec(example, {})  # this repository's own page, as a reader would copy it
    metrics.check(("brief",))
    question = Question("q", "", ("x",))
    said = [Prediction("Orlin County", "passage"), Prediction("in the county of Orlin", "passage")]
    answered = [AnsweredQuestion(question, found) for found in (*said, None)]
    scores = metrics.measure(answered, Scoring(), ("brief",))
    assert [metrics.title(name) for name in scores] == ["brief"]
    assert scores["brief"].value == 0.5 and scores["brief"].bottom_Q.sum() == 2
    assert metrics.reason("brief", answered) == "applies to no question"


def test_docs_training_page_lists_every_system():
    page = (ROOT / "docs" / "training.md").read_text("utf-8")
    table = page.partition("| system | retrieval |\n")[2].partition("\n\n")[0]
    names = re.findall(r"`(\w+)`", " ".join(line.split("|")[1] for line in table.splitlines()))
    assert sorted(names) == sorted(evaluate_retrieval.SYSTEMS)


def test_docs_method_page_imports_exist_and_its_config_is_the_real_one():
    page = (ROOT / "docs" / "adding_a_method.md").read_text("utf-8")
    program, *_ = blocks = re.findall(r"^```python\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    exec(program.partition("\n\n\n")[0], {})  # this repository's own page
    (example,) = (block for block in blocks if "def get_config" in block)
    names: dict[str, Any] = {}
    exec(example, names)
    real = load_config("configs/methods/ircot.py:small", ["--config.ircot.num_read=0"])
    assert names["get_config"]("small").to_dict() == real.to_dict()


def test_quickstart_next_commands_need_no_triples():
    source = (ROOT / "launch" / "quickstart.py").read_text("utf-8")
    (line,) = re.findall(r"\{train\} .*--config\.data\.dir=DATA.*", source)
    assert "--config.data.units=sentence" in line


@pytest.mark.parametrize("page", PAGES)
def test_docs_commands_of_datasets_limit_the_questions(page):
    """Without a split and a limit, a command answers thousands of questions, for hours."""
    for _, name, arguments in (one for one in COMMANDS if one[0] == page):
        line = " ".join(arguments)
        if name not in ("answer", "compare") or page.startswith("experiments"):
            continue
        if "--config.data.dir=DATA" in line and "--config.question" not in line:
            assert "--config.data.split=" in line and "--config.data.limit=" in line, line


def anchors(path: pathlib.Path) -> set[str]:
    """Returns the anchors that GitHub makes for the headings of a page."""
    titles = re.findall(r"^#+ +(.*)$", _FENCED.sub("", path.read_text("utf-8")), re.MULTILINE)
    plain = (re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", title).lower() for title in titles)
    return {re.sub(r"[^\w\- ]", "", title).replace(" ", "-") for title in plain}


@pytest.mark.parametrize("page", PAGES)
def test_docs_links_have_targets(page):
    path = ROOT / page
    for target, anchor in _LINK.findall(_FENCED.sub("", path.read_text("utf-8"))):
        file = (path.parent / target).resolve() if target else path
        assert file.exists(), f"{page}: {target}"
        if anchor and file.suffix == ".md":
            assert anchor[1:] in anchors(file), f"{page}: {target}{anchor}"


@pytest.mark.parametrize("page", PAGES)
def test_docs_tables_have_no_gap(page):
    """No blank line splits a table, because later rows would become plain text."""
    lines = _FENCED.sub("", (ROOT / page).read_text("utf-8")).splitlines()
    for number, line in enumerate(lines[:-1]):
        begins = line.startswith("|") and not (number and lines[number - 1].startswith("|"))
        assert not begins or re.match(r"\|[ :-]*-", lines[number + 1]), f"{page}: {line[:60]}"
