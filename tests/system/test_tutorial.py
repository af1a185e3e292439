"""Every lesson of docs/tutorial is run as a script: its cells end, its claims hold, and it prints and draws what the
page shows; numbers may be others. The first comparison ends with a picture."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from test_documents import blocks

TUTORIAL = Path(__file__).resolve().parents[2] / "docs" / "tutorial"


@pytest.mark.parametrize("name", [path.stem for path in sorted(TUTORIAL.glob("[0-9][0-9]-*.md"))])
def test_a_lesson_runs(name: str) -> None:
    command = [sys.executable, str(TUTORIAL / "build.py"), "--run", name]
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr


def test_the_first_comparison_ends_with_a_picture(tmp_path: Path) -> None:
    page = "docs/tutorial/first-comparison.md"
    (model,), (_, command, _) = blocks(page, "python"), blocks(page, "sh")
    (tmp_path / "my_model.py").write_text(model, encoding="utf-8")
    words = [sys.executable, "-m", "paceline", *command.split()[1:]]
    ran = subprocess.run(words, capture_output=True, text=True, cwd=tmp_path, check=False)
    assert ran.returncode == 0, ran.stderr
    assert (tmp_path / "picture" / "report.html").is_file()
    assert list((tmp_path / "picture" / "figures").glob("*.png"))
