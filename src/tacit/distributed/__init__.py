"""More than one process for one run: whole portions of every step go to the ranks of `torch.distributed`."""

from tacit.distributed._shards import Shards, shards_of
from tacit.distributed._team import MOST_UNITS as MOST_UNITS
from tacit.distributed._team import LeaderFailed, Team, team

__all__ = ["LeaderFailed", "Shards", "Team", "shards_of", "team"]
