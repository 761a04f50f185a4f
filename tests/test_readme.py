"""The README's first screen runs as printed."""

import re
import subprocess
import sys
from pathlib import Path

README = Path(__file__).parent.parent / "README.md"


def test_example_prints_what_the_readme_shows():
    code, printed = re.search(
        r"```python\n(.*?)```\n```\n(.*?)```", README.read_text(), re.DOTALL
    ).groups()
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout == printed


def test_picture_and_commands_exist():
    text = README.read_text()
    makefile = (README.parent / "Makefile").read_text()
    for picture in re.findall(r"!\[.*?\]\((.*?)\)", text):
        assert (README.parent / picture).exists()
    for target in re.findall(r"^    make (\w+)", text, re.MULTILINE):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE)
