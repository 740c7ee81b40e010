"""Record the prose of the project's documents and docstrings, for the training of the guide.

    python scripts/guide/documents.py

The documents change with the code, so training on them directly would give another model after every change. So their
prose is recorded in `corpus/documents.txt`, and recorded again before a new guide is trained. Programs, tables and
drawings are left out: the guide answers in sentences.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path

from corpus import CORPUS_FOLDER, PAGE_BREAK

REPOSITORY = Path(__file__).parents[2]
MIN_CHARACTERS = 200


def prose(text: str) -> str:
    """Return the paragraphs and lists of a text, one line each, without links."""
    text = re.sub(r"```.*?```", "", text, flags=re.DOTALL)
    text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", text)
    paragraphs = (paragraph for paragraph in re.split(r"\n\s*\n|\n(?=- )", text) if not _is_figure(paragraph))
    return "\n".join(" ".join(paragraph.split()) for paragraph in paragraphs).strip()


def _is_figure(paragraph: str) -> bool:
    return paragraph.lstrip("\n").startswith(("|", "  ", ">>>", "..."))


def docstrings(source: str) -> list[str]:
    """Return the docstrings of a Python source."""
    nodes = (ast.Module, ast.ClassDef, ast.FunctionDef)
    return [ast.get_docstring(node) or "" for node in ast.walk(ast.parse(source)) if isinstance(node, nodes)]


def main() -> None:
    """Write the file."""
    pages = [REPOSITORY / "README.md", REPOSITORY / "ARCHITECTURE.md", *sorted(REPOSITORY.glob("docs/**/*.md"))]
    texts = [page.read_text(encoding="utf-8") for page in pages]
    for path in sorted(REPOSITORY.glob("src/quire/**/*.py")):
        texts += docstrings(path.read_text(encoding="utf-8"))
    pieces = [piece for piece in map(prose, texts) if len(piece) >= MIN_CHARACTERS]
    (CORPUS_FOLDER / "documents.txt").write_text(PAGE_BREAK.join(pieces) + "\n", encoding="utf-8")
    print(f"{len(pieces)} texts, {sum(map(len, pieces))} characters")


if __name__ == "__main__":
    main()
