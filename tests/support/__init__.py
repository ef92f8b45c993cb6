"""Judges and samples that several tests share."""
