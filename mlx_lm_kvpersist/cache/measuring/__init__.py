"""Measurements of a loaded model: attention plans, memory of prompts, effect of quantizing."""
