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

# Asked of a model that can chat, through its chat template.
ASKED_FOR_CODE = [
    "Write a Python function that merges two sorted lists into one sorted list.",
    "Write a Python class for a bank account with deposit, withdraw and a list of transactions.",
    "Write a Python function that reads a CSV file and returns the sum of each numeric column.",
    "Implement binary search in Python and add a docstring with two examples.",
    "Write a Python decorator that measures how long a function takes and logs it.",
    "Write a Python function that counts the words of a text and returns the ten most common.",
    "Implement a queue with two stacks in Python and write three unit tests for it.",
    "Write a Python function that checks whether the brackets of a string are balanced.",
    "Write a Python script that renames all files in a folder to lower case, with argparse.",
    "Write a Python function that computes the transpose of a matrix given as a list of lists.",
    "Write a Python generator that yields the prime numbers below n with a sieve.",
    "Write a Python function that flattens a nested list of any depth.",
]
ASKED_IN_CHAT = [
    "What should I think about before I adopt a dog?",
    "Explain to a ten-year-old why the sky is blue.",
    "Give me three ideas for a cheap dinner with lentils.",
    "How do I prepare for a job interview at a small company?",
    "Summarise the plot of Romeo and Juliet in a few sentences.",
    "What is the difference between a virus and a bacterium?",
    "Write a short letter to a neighbour about the noise at night.",
    "Which exercises help against a stiff back after a day at a desk?",
    "Why did the Roman Empire fall? Name the main reasons.",
    "Plan a weekend in Lisbon for someone who likes walking.",
    "How does compound interest work? Use an example with numbers.",
    "What are the pros and cons of working from home?",
]
