"""The summary over test sessions, and the rule that a test which CI skips for want of parts has failed."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

REPORT = """<testsuites><testsuite>
<testcase classname="tests.a" name="quick" time="0.1"/>
<testcase classname="tests.a" name="slow" time="9.5"/>
<testcase classname="tests.b" name="absent" time="0.0"><skipped/></testcase>
{more}
</testsuite></testsuites>"""


@pytest.mark.parametrize(
    ("more", "last", "code"),
    [
        ("", "2 passed, 0 failed, 1 skipped", 0),
        ('<testcase classname="c" name="bad" time="1"><failure/></testcase>', "2 passed, 1 failed, 1 skipped", 1),
    ],
)
def test_the_slowest_come_first_and_the_count_last(tmp_path, more, last, code):
    (tmp_path / "fast.xml").write_text(REPORT.format(more=more))
    done = subprocess.run(
        [sys.executable, ROOT / "tools/slowest.py", tmp_path], capture_output=True, text=True, check=False
    )
    lines = done.stdout.strip().splitlines()
    assert (lines[-1], done.returncode) == (last, code)
    assert lines[1].split() == ["9.5", "s", "tests.a::slow"]


def test_no_report_is_a_failure(tmp_path):
    done = subprocess.run([sys.executable, ROOT / "tools/slowest.py", tmp_path], capture_output=True, check=False)
    assert done.returncode == 1


def test_a_missing_part_fails_where_parts_are_required(tmp_path):
    (tmp_path / "conftest.py").write_text((ROOT / "tests/conftest.py").read_text())
    (tmp_path / "torch.py").write_text("def set_num_threads(count): pass\n")  # the real one takes seconds to import
    (tmp_path / "test_it.py").write_text(
        "import pytest\n@pytest.mark.parts\ndef test_it(parts):\n    assert parts('nothing')\n"
    )
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-c", ROOT / "pyproject.toml", "--rootdir", tmp_path, tmp_path],
        env={
            **os.environ,
            "PYTHONPATH": str(tmp_path),
            "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
            "DILADIFF_REQUIRE_PARTS": "1",
            "DILADIFF_PARTS": str(tmp_path / "none"),
        },
        capture_output=True,
        text=True,
        check=False,
    )
    assert "1 failed" in done.stdout.splitlines()[-1], done.stdout
    assert "run `make parts`" in done.stdout
