"""Help: one screen a command, and topics that have every option once."""

import re
from collections import Counter

import pytest

from scanl.cli import COMMANDS, main
from scanl.learning import TrainConfig
from scanl.learning.online.config import LearnConfig
from scanl.learning.run.configuration import names_of

WITH_TOPICS = {
    "train": (TrainConfig, ("config", "print_config", "resume")),
    "lr": (TrainConfig, ("config", "print_config", "trials", "picture")),
    "learn": (LearnConfig, ("resume",)),
}
PAGES = [
    *((name, "") for name in COMMANDS),
    *((name, topic) for name, (config, _) in WITH_TOPICS.items() for topic in config.topics),
]


@pytest.fixture
def shown(capsys, monkeypatch):
    """What a command line prints on a terminal of 80 columns."""
    monkeypatch.setenv("COLUMNS", "80")

    def show(*words):
        try:
            code = main([word for word in words if word])
        except SystemExit as done:
            code = done.code
        assert code == 0
        return capsys.readouterr().out

    return show


def options(page):
    """The options that have a row on a page."""
    return re.findall(r"^  --([\w-]+)", page, re.MULTILINE)


@pytest.mark.parametrize(("name", "topic"), PAGES)
def test_a_help_fits_on_a_screen(name, topic, shown, monkeypatch):
    lines = shown(name, "--help", topic).splitlines()
    assert len(lines) <= 45
    assert max(map(len, lines)) <= 80
    monkeypatch.setenv("COLUMNS", "200")
    assert max(map(len, shown(name, "--help", topic).splitlines())) <= 100


def test_the_help_of_all_commands_fits_on_a_screen(shown):
    lines = shown("--help").splitlines()
    assert len(lines) <= 45
    assert max(map(len, lines)) <= 80


@pytest.mark.parametrize("name", WITH_TOPICS)
def test_topics_have_every_option_once(name, shown):
    config, own = WITH_TOPICS[name]
    every = Counter([*(option.replace("_", "-") for option in names_of(config)), *own])
    pages = [shown(name, "--help", topic) for topic in config.topics]
    assert Counter(option for page in pages for option in options(page)) == every
    assert Counter(options(shown(name, "--help", "all"))) == every
    first = shown(name, "--help")
    assert re.findall(r"^  --help (\w+)", first, re.MULTILINE) == [*config.topics, "all"]


@pytest.mark.parametrize("name", COMMANDS)
def test_examples_have_options_that_there_are_and_types_are_words(name, shown):
    page = shown(name, "--help", "all")
    examples = [line for line in page.splitlines() if line.startswith((f"  scanl {name} ", "      --"))]
    assert examples or not re.search("^examples:", page, re.MULTILINE)
    used = re.findall(r" --([\w-]+)", " ".join(examples))
    assert set(used) <= {*options(page)}
    if name in WITH_TOPICS:
        assert set(options(shown(name, "--help"))) - {"help"} == set(used)
    assert not re.search(r"Optional|Union|null|\bstr\b|\bint\b|\bfloat\b", page)


def test_defaults_are_those_of_the_question(shown):
    page = " ".join(shown("train", "--help", "forecast").split())
    assert "negative_binomial (default: gaussian; to forecast: quantiles)" in page
    assert "none: a season (to forecast: chosen by backtests)" in page
    assert "to forecast: " not in shown("lr", "--help", "all")  # it trains as the line says
    assert "scanl list" in shown("train", "--help", "model")


def test_a_topic_behind_help(shown, capsys):
    assert shown("help", "train", "devices") == shown("train", "--layer", "lru", "-h", "devices")
    assert shown("forecast", "--help", "all") == shown("forecast", "run", "--help")
    assert main(["train", "--help", "modle"]) == 2
    assert "unknown topic of scanl train --help 'modle'; did you mean 'model'?" in capsys.readouterr().err
