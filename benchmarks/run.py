"""Run every benchmark suite beside this file, each in its own process: `make linear_probe`.

A suite is a file that defines `main(argv)`. Arguments are passed on to every suite; `--only NAME ...` before them picks
suites by file name.
"""

from __future__ import annotations

import argparse
import ast
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent


def suites() -> list[Path]:
    """Files that define a top-level `main(argv)`."""
    found = []
    for path in sorted(HERE.glob("*.py")):
        functions = [node for node in ast.parse(path.read_text()).body if isinstance(node, ast.FunctionDef)]
        if path != Path(__file__).resolve() and any(f.name == "main" and f.args.args for f in functions):
            found.append(path)
    return found


def run() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", metavar="NAME", choices=[path.stem for path in suites()])
    options, rest = parser.parse_known_args()
    failed = []
    for path in suites():
        if options.only and path.stem not in options.only:
            continue
        print(f"== {path.stem}", flush=True)
        if subprocess.run([sys.executable, path, *rest], check=False).returncode:
            failed.append(path.stem)
    if failed:
        print(f"These suites did not finish: {', '.join(failed)}.", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(run())
