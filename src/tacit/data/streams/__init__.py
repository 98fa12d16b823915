"""Streams of shifted pictures: who comes when, under which shift. Described as data, made when asked for."""

from tacit.data.streams._streams import CLEAN, Batch, Setting, Stream, corrupted

__all__ = ["CLEAN", "Batch", "Setting", "Stream", "corrupted"]
