"""`forerun certify`: enumeration on table models, or a sequential test on a real one."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

import typer
from rich.console import Console
from rich.progress import Progress
from rich.status import Status

from forerun.errors import BadOption

aside = Console(stderr=True)


def run(
    method: str,
    model: str | None,
    draft: str | None,
    tested: dict[str, Any],
    options: dict[str, Any],
    place: dict[str, Any],
    as_json: bool,
) -> None:
    if model is None:
        if draft is not None or options:
            names = ", ".join(["draft"] * (draft is not None) + list(options))
            raise BadOption(f"{names}: only with --model; without one, enumeration goes through its own drafts and options.")
        fine = _enumerate(method, as_json)
    else:
        fine = _test(method, model, draft, {**tested, **options}, place, as_json)
    raise typer.Exit(0 if fine else 1)


def _enumerate(method: str, as_json: bool) -> bool:
    from forerun.evaluate.enumerate import CERTAIN, standard_cases

    cases = standard_cases(method)
    with Progress(console=aside, transient=True) as progress:
        task = progress.add_task("enumerating every outcome", total=len(cases))
        found = []
        for case in cases:
            found.append(case())
            progress.advance(task)
    worst = max(found, key=lambda certificate: certificate.distance)
    fine = all(certificate.holds for certificate in found)
    if as_json:
        report = {"verdict": "holds" if fine else "fails", "method": method, "cases": len(found), "worst": asdict(worst)}
        typer.echo(json.dumps(report))
    else:
        word = "[green]holds[/]" if fine else "[red]fails[/]"
        Console().print(
            f"{method}: {word}. {len(found)} table models and parameters enumerated; the law of whole sequences differs from the "
            f"reference's by at most {worst.distance:.1e} in total variation (limit {CERTAIN:.0e}).",
            highlight=False,
        )
        if not fine:
            Console().print(f"worst case: {worst.case}", highlight=False)
    return fine


def _test(method: str, name: str, draft: str | None, options: dict[str, Any], place: dict[str, Any], as_json: bool) -> bool:
    from forerun.arguments import read_wish
    from forerun.cli.generate import load
    from forerun.evaluate.certify import Verdict, certify

    own = ("alpha", "beta", "max_sequences")
    read_wish(method, draft, {key: value for key, value in options.items() if key not in own})  # before the model is loaded
    model = load(name, **place)
    with Status("testing …", console=aside) as status:

        def report(now: Verdict) -> None:
            weakest = min(now.power.values(), default=0.0)
            status.update(
                f"testing … {now.sequences} sequences, {now.tokens} tokens, evidence {now.evidence:.2g}, power {weakest:.0%}"
            )

        verdict = certify(model, method, draft=draft, progress=report, **options)
    if as_json:
        typer.echo(json.dumps(asdict(verdict)))
    else:
        _print(verdict)
    return verdict.verdict == "holds"


def _print(verdict: Any) -> None:
    console = Console()
    colour = {"holds": "green", "fails": "red", "undecided": "yellow"}[verdict.verdict]
    console.print(
        f"{verdict.method} on {verdict.model} at temperature {verdict.temperature:g}: [{colour}]{verdict.verdict}[/] "
        f"(reference: {verdict.reference}; {verdict.tokens} tokens in {verdict.sequences} sequences)",
        highlight=False,
    )
    if verdict.temperature > 0:
        console.print(
            f"  evidence against it {verdict.evidence:.3g}; refuted above {1 / verdict.alpha:g} (error rate {verdict.alpha:g})"
        )
        if verdict.impossible:
            console.print(f"  {verdict.impossible} tokens that the reference could not have written", highlight=False)
        console.print("  probability that a fault would have been caught by now:")
        for fault, power in verdict.power.items():
            console.print(f"    {power:6.1%}  {fault}", highlight=False)
    for difference in verdict.differences:
        why = "within rounding" if difference["explained"] else "not explained by rounding"
        console.print(f"  differs at token {difference['at']}: logit gap {difference['gap']}, {why}", highlight=False)
