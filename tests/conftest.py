"""What tests of several packages share. No example has a deadline: other work may share the machine."""

import pytest
from hypothesis import settings

from distca import cli

settings.register_profile("distca", deadline=None)
settings.load_profile("distca")


@pytest.fixture
def run(capsys, tmp_path, monkeypatch):
    """Run `distca …` in an empty folder: (exit code, stdout, stderr)."""
    monkeypatch.chdir(tmp_path)

    def call(*arguments):
        with pytest.raises(SystemExit) as stop:
            cli.main([str(argument) for argument in arguments])
        captured = capsys.readouterr()
        return stop.value.code, captured.out, captured.err

    return call
