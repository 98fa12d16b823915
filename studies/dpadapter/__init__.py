"""Robust public pretraining, and private fine-tuning of what it left."""
