"""Complete Python functions so that they parse: a grammar of Python for left-to-right decoding.

    python examples/python_grammar.py [--model zoo:ar] [--samples 8] [--free]

Indentation is not context-free, but up to a fixed depth it is: there is a rule for every depth. A
body has a bounded number of lines, so that every completion comes to an end. Without `--free`, all
completions that end parse; with it, the model writes what it likes.
"""

from __future__ import annotations

import argparse
import ast

import forerun

PROMPTS = [
    "def largest(values):\n",
    "def area(width, height):\n",
    "def read_lines(path):\n",
    "def count_words(text):\n",
]
INDENT = "    "

EXPRESSIONS = r"""
expr: test (" if " test " else " test)?
test: negated ((" and " | " or ") negated)*
negated: "not "? compared
compared: sum (COMPARE sum)?
sum: part (OPERATOR part)*
part: "-"? (NUMBER | atom trailer*)
atom: NAME | STRING | CONSTANT | "(" expr ")" | "[" (expr (", " expr)*)? "]" | listed | mapped
listed: "[" expr " for " NAME " in " sum (" if " test)? "]"
mapped: "{" (expr ": " expr (", " expr ": " expr)*)? "}"
trailer: "." NAME | "(" arguments? ")" | "[" expr "]"
arguments: expr (", " expr)* (", " named)* | named (", " named)*
named: NAME "=" expr
target: NAME ("." NAME | "[" expr "]")*
simple: "return" (" " expr)? | "pass" | target ASSIGN expr | "raise " expr | call
call: NAME ("." NAME)* "(" arguments? ")"
NAME: /[a-zA-Z_][a-zA-Z0-9_]*/ & ~KEYWORD
KEYWORD: /(and|as|assert|async|await|break|class|continue|def|del|elif|else|except|finally|for|from/
    /|global|if|import|in|is|lambda|nonlocal|not|or|pass|raise|return|try|while|with|yield|None/
    /|True|False)/
CONSTANT: "None" | "True" | "False"
NUMBER: /(0|[1-9][0-9]{0,8})(\.[0-9]{1,6})?/
STRING: /"[^"\\\n]{0,60}"/ | /'[^'\\\n]{0,60}'/
COMPARE: " == " | " != " | " < " | " > " | " <= " | " >= "
    | " in " | " not in " | " is " | " is not "
OPERATOR: " + " | " - " | " * " | " / " | " // " | " % " | " ** "
ASSIGN: " = " | " += " | " -= " | " *= "
"""


def python_grammar(depth: int = 3, lines: int = 6) -> str:
    """The body of a function, in Lark's form, with blocks nested up to `depth` and at most `lines`
    lines in each."""
    rules = [f"start: body1\n{EXPRESSIONS}"]
    for level in range(1, depth + 1):
        indent = f'"{INDENT * level}"'
        inner = f"body{level + 1}"
        rules.append(f"body{level}: line{level}{{1,{lines}}}")
        if level == depth:
            rules.append(f'line{level}: {indent} simple "\\n"')
            continue
        rules.append(f'line{level}: {indent} (simple "\\n" | block{level})')
        rules.append(
            f'block{level}: "if " expr ":\\n" {inner} ({indent} "else:\\n" {inner})?\n'
            f'    | "for " NAME " in " expr ":\\n" {inner}\n'
            f'    | "while " expr ":\\n" {inner}\n'
            f'    | "with " expr " as " NAME ":\\n" {inner}'
        )
    return "\n".join(rules).replace("/\n    /", "")


def parses(text: str) -> bool:
    try:
        ast.parse(text)
    except SyntaxError:
        return False
    return True


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="zoo:ar")
    parser.add_argument("--method", default="lookup")
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--max-tokens", type=int, default=160)
    parser.add_argument("--free", action="store_true")
    asked = parser.parse_args()
    model = forerun.load(asked.model)
    results = model.generate(
        PROMPTS,
        method=asked.method,
        grammar=None if asked.free else python_grammar(lines=4),
        n=asked.samples,
        temperature=0.8,
        max_tokens=asked.max_tokens,
    )
    prompts = [prompt for prompt in PROMPTS for _ in range(asked.samples)]
    finished = [(p, r) for p, r in zip(prompts, results) if r.finish_reason != "unmet"]
    good = sum(parses(prompt + result.text) for prompt, result in finished)
    print(finished[0][0] + finished[0][1].text)
    print(f"{len(results)} completions, {len(finished)} of them ended, {good} of those parse.")


if __name__ == "__main__":
    main()
