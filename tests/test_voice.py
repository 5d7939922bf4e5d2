"""The list of words to avoid: the words are counted in text and names, and their counts only fall."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import voice

LIST = voice.WordList(
    """# a comment
brown, quick brown | dark
fox, foxes | dog

[names]
# another comment
fox | dog
=animal | dog
"""
)
PYTHON = '''"""A quick
brown animal."""

def see_fox(fox: str) -> str:  # The fox.
    seen_Fox = f"brown {fox} foxes"
    return fox + seen_Fox.brown


class LittleFox:
    animal, an_animal = 1, 2
'''


def test_phrases_count_once_also_across_lines() -> None:
    words = [*LIST.words_in("The Quick\n  brown Fox,\nbrownish firefox.\n\nFoxes!\n", ".md")]
    assert [(word.line, word.text, word.instead) for word in words] == [
        (1, "Quick brown", "dark"),
        (2, "Fox", "dog"),
        (5, "Foxes", "dog"),
    ]


def test_of_python_its_comments_strings_and_defined_names_count() -> None:
    words = [(word.line, word.text) for word in LIST.words_in(PYTHON, ".py")]
    assert words == [
        (1, "quick brown"),
        (4, "fox"),
        (4, "fox"),
        (4, "see_fox"),
        (5, "brown"),
        (5, "foxes"),
        (5, "seen_Fox"),
        (9, "LittleFox"),
        (10, "animal"),
    ]


def test_a_count_may_fall_but_not_rise_and_a_new_file_starts_at_zero() -> None:
    allowed = voice.frozen("   3 a.md\n  12 some folder/b.py\n   1 gone.md\n")
    counts = {"a.md": 2, "some folder/b.py": 13, "new.md": 1, "clean.py": 0}
    assert voice.rises(counts, allowed) == {"some folder/b.py": 13, "new.md": 1}
    assert voice.written(voice.lowered(counts, allowed)) == "   2 a.md\n  12 some folder/b.py\n"


def test_of_a_merge_with_conflicts_the_higher_count_holds() -> None:
    text = "<<<<<<< ours\n   3 a.md\n   4 b.md\n=======\n   2 a.md\n>>>>>>> theirs\n   5 b.md\n"
    assert voice.frozen(text) == {"a.md": 3, "b.md": 5}


@pytest.fixture
def clone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "words.txt").write_text("fox | dog\n\n[names]\nfox | dog\n")
    monkeypatch.setattr(voice, "ROOT", tmp_path)
    monkeypatch.setattr(voice, "WORDS", tmp_path / "words.txt")
    monkeypatch.setattr(voice, "COUNTS", tmp_path / "counts.txt")
    monkeypatch.setattr(voice, "files_of", lambda root: sorted(root.glob("*.md")))
    return tmp_path


def test_writing_lowers_counts_and_refuses_new_words(clone: Path, capsys: pytest.CaptureFixture[str]) -> None:
    counts = clone / "counts.txt"
    (clone / "a.md").write_text("A fox.")
    counts.write_text("   2 a.md\n")
    assert voice.main([]) == 0
    assert counts.read_text() == "   2 a.md\n"
    assert voice.main(["--write"]) == 0
    assert counts.read_text() == "   1 a.md\n"
    (clone / "a.md").write_text("A fox.\nA fox.")
    assert voice.main(["--write"]) == 1
    assert "a.md: 2 words" in capsys.readouterr().out
    assert counts.read_text() == "   1 a.md\n"
    assert voice.main([str(clone / "a.md")]) == 0
    assert capsys.readouterr().out == "a.md:1: 'fox': dog\na.md:2: 'fox': dog\n"


def test_text_may_move_to_another_file_but_not_grow_on_the_way(clone: Path) -> None:
    counts = clone / "counts.txt"
    counts.write_text("   2 a.md\n")
    (clone / "a.md").write_text("A fox.")
    (clone / "b.md").write_text("A fox.")
    assert voice.main([]) == 1
    assert voice.main(["--moved"]) == 0
    assert counts.read_text() == "   1 a.md\n   1 b.md\n"
    (clone / "b.md").write_text("A fox, a fox.")
    assert voice.main(["--moved"]) == 1
    assert counts.read_text() == "   1 a.md\n   1 b.md\n"


def test_the_project_s_list_is_read_and_its_reader_needs_none_of_it() -> None:
    words = voice.WordList(voice.WORDS.read_text())
    text = "Who" + "ever goes" + "\non"
    assert [(word.line, word.instead) for word in words.words_in(text, ".md")] == [
        (1, "the caller, any process; any value; any location"),
        (1, "resume, continue"),
    ]
    assert [*words.words_in(Path(voice.__file__).read_text(), ".py")] == []
