"""Replaying releases after a crash: the same key, release and batch give the same release, not a second one."""

from tacit.privacy.replay._replay import adopt, keep, resume

__all__ = ["adopt", "keep", "resume"]
