"""Distillation: synthetic images, representative records and students."""
