"""How far long work is, and what it has spent: a bar on a terminal, a few plain lines elsewhere."""

from tacit.progress._progress import Bar, budget_text, shown

__all__ = ["Bar", "budget_text", "shown"]
