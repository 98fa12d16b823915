"""Recalibration from many private sources: methods x sources x samples x epsilon."""
