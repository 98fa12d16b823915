"""Fine-tuning on videos, several clips of each: its videos. Its arms are those of `studies.finetune`."""
