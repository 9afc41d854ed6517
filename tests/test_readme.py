"""The README's Python example runs as it stands."""

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def test_python_example(monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    examples = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.S)
    assert examples
    for example in examples:
        exec(compile(example, "README.md", "exec"), {})
    assert "430)" in capsys.readouterr().out  # 426 ids of the golden tokenizer and the four added ones


def test_every_command_it_names_exists():
    text = (ROOT / "README.md").read_text() + (ROOT / "CONTRIBUTING.md").read_text()
    for path in set(re.findall(r"(?:launch|tests|configs|docs|venus_jax)/[\w/]+\.(?:py|sh|md)", text)):
        assert (ROOT / path).is_file(), path
