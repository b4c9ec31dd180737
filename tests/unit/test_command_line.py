import shlex

import pytest

from loadtests.command_line import typed_command


@pytest.mark.parametrize(
    ("typed", "told"),
    [
        ("", "wisp bench"),
        ("faults", "wisp bench faults"),
        ("faults --output x.json --rounds 2 --output=y --kinds a,b", "wisp bench faults --rounds 2 --kinds a,b"),
        ("online --caps 8 --output /tmp/x.json --record rec", "wisp bench online --caps 8 --record rec"),
        ("online --work-dir=/tmp/w --resume --caps 8", "wisp bench online --resume --caps 8"),
        ("online --resume --output", "wisp bench online --resume"),
        ("plan /home/me/model --cap 4", "wisp bench plan --cap 4"),
    ],
)
def test_places_of_the_machine_are_left_out(monkeypatch: pytest.MonkeyPatch, typed: str, told: str) -> None:
    assert typed_command(arguments=shlex.split(typed)) == told
    monkeypatch.setattr("sys.argv", ["wisp", *shlex.split(typed)])
    assert typed_command() == told


def test_the_program_is_named() -> None:
    assert typed_command("wisp simulate", ["run", "--turns", "2 3"]) == "wisp simulate run --turns '2 3'"
