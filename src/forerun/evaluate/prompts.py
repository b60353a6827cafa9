"""Prompts written for this project, so that no model was trained on them. None ends inside a line's
indentation."""

CODE = [
    """import os


def read_lines(path):
    with open(path) as f:
        return f.read().splitlines()


def write_lines(path, lines):""",
    """class Stack:
    def __init__(self):
        self.items = []

    def push(self, item):
        self.items.append(item)

    def pop(self):""",
    """import argparse


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--verbose", action="store_true", help="Verbose output")
    parser.add_argument("--""",
    """import json
import logging

logger = logging.getLogger(__name__)


class Settings:
    def __init__(self, name, path=None):
        self.name = name
        self.path = path

    def load(self):""",
    '''def moving_average(values, size):
    """Return the mean of every window of the given size."""''',
    """import unittest


class TestTrim(unittest.TestCase):
    def test_empty(self):
        self.assertEqual(trim(""), "")

    def test_spaces(self):""",
]
