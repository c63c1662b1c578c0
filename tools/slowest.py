"""Read the reports of test sessions: print the slowest tests, then how many passed, failed and were skipped."""

import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path


def main(folder: Path, count: int = 10) -> int:
    """Print the summary of all sessions in `folder`; return 1 where a test failed or none ran."""
    cases = [case for report in sorted(folder.glob("*.xml")) for case in ElementTree.parse(report).iter("testcase")]
    print(f"\nThe {count} slowest tests of {len(cases)}:")
    for case in sorted(cases, key=lambda case: -float(case.get("time", 0)))[:count]:
        print(f"  {float(case.get('time', 0)):7.1f} s  {case.get('classname')}::{case.get('name')}")
    failed = sum(case.find("failure") is not None or case.find("error") is not None for case in cases)
    skipped = sum(case.find("skipped") is not None for case in cases)
    print(f"{len(cases) - failed - skipped} passed, {failed} failed, {skipped} skipped")
    return int(failed > 0 or not cases)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
