"""Plays the stories in `stories/`: command lines, `----`, what the core does.

After a change that is meant, `pytest tests/golden --rewrite` writes what happens now into the files; review the diff.
The form is that of etcd raft's testdata; the commands are in `story_engine.py`.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.golden.story_engine import StoryEngine

STORIES = sorted((Path(__file__).parent / "stories").glob("*.txt"))
RULER = "----"


def play(text: str) -> str:
    """The story as it happens now: comments and commands kept, answers anew."""
    engine = StoryEngine()
    paragraphs = []
    for paragraph in text.strip("\n").split("\n\n"):
        lines = paragraph.split("\n")
        if not lines[0].startswith("#"):
            commands = lines[: lines.index(RULER)] if RULER in lines else lines
            answers = [answer for command in commands for answer in engine.do(command)]
            lines = [*commands, RULER, *(answers or ["ok"])]
        paragraphs.append("\n".join(lines))
    return "\n\n".join(paragraphs) + "\n"


@pytest.mark.parametrize("path", STORIES, ids=lambda path: path.stem)
def test_story_happens_as_told(path: Path, request: pytest.FixtureRequest) -> None:
    told = path.read_text()
    assert told.startswith("# "), "a story opens with a sentence on the rule that it shows"
    happened = play(told)
    if request.config.getoption("--rewrite"):
        path.write_text(happened)
    else:
        assert happened == told


def test_answers_that_are_not_what_happens_are_found() -> None:
    told = play("# A story.\n\nengine num_blocks=4 block_size=2\nadd a prompt=1..3 max_tokens=1\nrun")
    assert told.endswith("----\na: 4 length\n")
    wrong = told.replace("a: 4", "a: 5")
    assert play(wrong) == told
