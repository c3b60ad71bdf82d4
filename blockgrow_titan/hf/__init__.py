"""Hugging Face in and out: teachers to distributed checkpoints, students to folders that transformers loads."""
