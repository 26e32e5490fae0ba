"""Finds engines, checks that they fit together, and follows what they tell."""
