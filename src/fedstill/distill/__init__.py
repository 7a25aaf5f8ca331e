"""Distillation: synthetic images, representatives and students, made from data and models."""
