"""Test-time adaptation: arms x settings x seeds along a stream of shifted images, and the source models."""
