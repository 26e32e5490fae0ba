"""Passes requests on to engines and their answers back, byte for byte."""
