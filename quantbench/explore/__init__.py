"""Builds a page that predicts any shape in the browser.

The page holds the models' code as JavaScript, and their trees as data.
"""
