"""Names: the words of glossary.toml, and a class name that stands for one class."""

from __future__ import annotations

import ast
import io
import re
import tokenize
import tomllib
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import prfaas

SOURCE = Path(prfaas.__file__).parent
GLOSSARY = Path(__file__).parents[1] / "glossary.toml"
WORD = re.compile(r"[A-Z]?[a-z0-9]+|[A-Z]+(?![a-z])")
NAMES_OF_OTHERS = {
    "cutoff",  # difflib.get_close_matches
    "home",  # pathlib.Path.home
    "HOME_GROUP",
    "_away_since_ns",  # a peer that is not connected
    "peer_away",
}
MESSAGES = SOURCE / "wire" / "messages"


def unused_words() -> dict[str, str]:
    """Words that are not used in identifiers, with the term that is."""
    terms = tomllib.loads(GLOSSARY.read_text(encoding="utf-8"))["term"]
    return {word: term["name"] for term in terms for word in term.get("not", ())}


def identifiers(text: str) -> Iterator[tuple[str, int]]:
    """Identifiers of a module and their lines."""
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.NAME:
            yield token.string, token.start[0]


def misnamed(text: str, words: dict[str, str]) -> list[str]:
    """Identifiers of a module that have a word which is not used, in words."""
    return [
        f"line {line}: {name} says {word!r}; the glossary has {words[word]!r}"
        for name, line in identifiers(text)
        if name not in NAMES_OF_OTHERS
        for word in {part.lower() for part in WORD.findall(name)} & words.keys()
    ]


def shared(classes: dict[str, list[str]]) -> dict[str, list[str]]:
    """Public names of several classes. A protocol message may have the name of an action."""
    found = {}
    for name, files in classes.items():
        ours = [file for file in files if not file.startswith("wire/messages/")]
        if len(ours) > 1 or len(files) - len(ours) > 1:
            found[name] = files
    return found


def test_identifiers_use_the_words_of_the_glossary() -> None:
    words, found = unused_words(), {}
    for file in SOURCE.rglob("*.py"):
        if wrong := misnamed(file.read_text(encoding="utf-8"), words):
            found[str(file.relative_to(SOURCE))] = wrong
    assert found == {}


def test_a_word_that_is_not_used_is_found() -> None:
    assert len(misnamed("class DoorBell:\n    def take_home(self): ...\n", unused_words())) == 2


def test_a_public_class_name_stands_once() -> None:
    classes = defaultdict(list)
    for file in SOURCE.rglob("*.py"):
        for node in ast.parse(file.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                classes[node.name].append(str(file.relative_to(SOURCE)))
    assert shared(classes) == {}


def test_a_name_of_two_classes_is_found() -> None:
    one, two, message = "core/a.py", "pool/b.py", "wire/messages/c.py"
    assert shared({"A": [one, two], "B": [one, message], "C": [one]}) == {"A": [one, two]}
