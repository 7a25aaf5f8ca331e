"""Labelled images from many sources, and the rules that deal them to clients."""
