"""The tables of finished studies as Markdown, for docs/reproduction: cells that were not run stay empty.

python recipes/tables.py OUT RECIPE.toml ... [--shifts]
"""

from __future__ import annotations

import argparse
from pathlib import Path

from tacit import recipes
from tacit.adapt.study import Study, read
from tacit.report.adapt import by_shift, overview


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("recipe", type=Path, nargs="+")
    parser.add_argument("--shifts", action="store_true", help="shift by shift as well")
    options = parser.parse_args()
    for path in options.recipe:
        _, study = recipes.read(path, {"adapt": Study})
        result = read(study, options.out)
        for setting in study.settings:
            print(f"\n### {study.title} ({path.name}, {setting})\n")
            print(overview(result, setting).markdown())
            if options.shifts:
                print(by_shift(result, setting).markdown())


if __name__ == "__main__":
    main()
