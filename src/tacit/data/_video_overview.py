"""What a person should know of a set of videos before anything is trained on it. For the curator, beside the data.

Numbers of private videos are private, so remarks contain none: they say what to look at. Counts are given where the
videos are declared public.
"""

from __future__ import annotations

from collections.abc import Sequence

MANY = 10  # classes from which on single videos look like a mistake in the layout


def remarks(counts: Sequence[int], *, skipped: bool) -> list[str]:
    """Sentences about files that were left out and classes that cannot be learned; `counts`: units of each class."""
    said = []
    if skipped:
        said.append("Some files were left out, because they cannot be read or are no videos: .skipped lists them.")
    if any(count == 0 for count in counts):
        said.append("Some classes have no video: .empty_classes lists them.")
    single = sum(count == 1 for count in counts)
    if len(counts) >= MANY and 2 * single > len(counts):
        said.append(
            f"There are {len(counts)} classes, and most have a single video: is each folder a class? If a folder is a "
            "video (CLASS_N/FILE), give labels of your own: VideoClips(files, labels)."
        )
    elif single:
        said.append("Some classes have a single video, so they cannot be learned: .single_classes lists them.")
    return said


def overview(unit: str, names: Sequence[str], counts: Sequence[int] | None, said: Sequence[str]) -> str:
    """A few lines; `counts` only where the videos are public."""
    lines = [f"unit: {unit}; {len(names)} classes"]
    if counts is not None:
        width = max((len(name) for name in names), default=0)
        lines += [f"  {name:<{width}}  {count}" for name, count in zip(names, counts, strict=True)]
    return "\n".join([*lines, *said])
