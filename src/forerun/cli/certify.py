"""`forerun certify`: enumeration on table models, or a sequential test on a real one."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from importlib.util import find_spec
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.status import Status

from forerun.cli.common import load, print_json, progress_bar, stderr_console
from forerun.cli.flags import (
    WITH_METHOD_OPTIONS,
    Device,
    Draft,
    Dtype,
    Json,
    MethodOptions,
    Quantize,
    Quiet,
    takes_flags_and_options,
)
from forerun.errors import BadOption

if TYPE_CHECKING:
    from forerun.certify.testing import SequentialVerdict

COLOURS = {"holds": "green", "fails": "red", "undecided": "yellow"}

app = typer.Typer(add_completion=False)


@dataclass(frozen=True)
class CertifyFlags:
    method: Annotated[str, typer.Option(help="The method to certify.")]
    model: Annotated[
        str | None, typer.Option(help="Test on this model; without one, enumerate on table models.")
    ] = None
    draft: Draft = None
    temperature: Annotated[float, typer.Option(help="0 compares tokens, above 0 laws.")] = 1.0
    alpha: Annotated[float, typer.Option(help="Most probability of refuting a right method.")] = (
        0.01
    )
    beta: Annotated[
        float, typer.Option(help="Most probability of missing any of the named faults.")
    ] = 0.05
    max_tokens: Annotated[int, typer.Option(help="Tokens per sequence.")] = 32
    max_sequences: Annotated[
        int, typer.Option(help="Stop undecided after this many sequences.")
    ] = 400
    seed: Annotated[int, typer.Option(help="Of the sequences and of the shadow runs.")] = 0
    device: Device = None
    dtype: Dtype = None
    quantize: Quantize = None
    quiet: Quiet = False
    as_json: Json = False


@app.command(context_settings=WITH_METHOD_OPTIONS)
@takes_flags_and_options(CertifyFlags)
def certify(flags: CertifyFlags, options: MethodOptions) -> None:
    """Prove that the output of a method has the law of its reference.

    The proof is exact on table models, and a sequential test on a real one. Options of the method
    are flags too: --k 8; see `forerun methods`.
    """
    if flags.model is not None:
        holds = _test(flags, flags.model, options)
    elif flags.draft is not None:
        raise BadOption(
            "draft: only with --model; without one, enumeration goes through drafts of its own."
        )
    else:
        holds = _enumerate(flags.method, options, flags.as_json)
    raise typer.Exit(0 if holds else 1)


def _enumerate(method: str, options: MethodOptions, as_json: bool) -> bool:
    from forerun.certify.cases import (
        canvas_cases,
        cases_with,
        claims_of,
        constrained_cases,
        healed_cases,
    )
    from forerun.certify.enumeration import CERTAIN

    cases = cases_with(method, options)
    if not options:
        cases += healed_cases(method)
    if not options and find_spec("llguidance") is not None:
        cases += constrained_cases(method)
    if not options and find_spec("outlines_core") is not None:
        cases += canvas_cases(method)
    promises = [claim.reason for claim in claims_of(method, cases) if claim.reason]
    certificates = []
    with progress_bar("enumerating every outcome") as progress:
        for case in cases:
            certificates.append(case())
            progress(len(certificates), len(cases))
    worst = max(certificates, key=lambda certificate: certificate.distance)
    holds = all(certificate.holds for certificate in certificates)
    if as_json:
        verdict = "holds" if holds else "fails"
        facts = {"verdict": verdict, "method": method, "cases": len(cases), "worst": asdict(worst)}
        print_json({**facts, "promises": promises})
        return holds
    verdict = "[green]holds[/]" if holds else "[red]fails[/]"
    Console().print(
        f"{method}: {verdict}. {len(cases)} table models and parameters enumerated; the law of "
        f"whole sequences differs from the reference's by at most {worst.distance:.1e} in total "
        f"variation (limit {CERTAIN:.0e}).",
        highlight=False,
    )
    for promise in promises:
        Console().print(f"  among them: {promise}", highlight=False)
    if not holds:
        Console().print(f"worst case: {worst.case}", highlight=False)
    return holds


def _test(flags: CertifyFlags, name: str, options: MethodOptions) -> bool:
    from forerun.certify.testing import certify
    from forerun.requests.request import parse_request

    sampling = dict(temperature=flags.temperature, max_tokens=flags.max_tokens, seed=flags.seed)
    limits = dict(alpha=flags.alpha, beta=flags.beta, max_sequences=flags.max_sequences)
    # a wrong option is refused before the model is loaded
    asked = {**sampling, **options}
    parse_request(flags.method, flags.draft, {k: v for k, v in asked.items() if k not in limits})
    model = load(name, device=flags.device, dtype=flags.dtype, quantize=flags.quantize)
    with Status("testing …", console=stderr_console) as status:

        def report(verdict: SequentialVerdict) -> None:
            weakest = min(verdict.power.values(), default=0.0)
            status.update(
                f"testing … {verdict.sequences} sequences, {verdict.tokens} tokens, evidence "
                f"{verdict.evidence:.2g}, power {weakest:.0%}"
            )

        settings: MethodOptions = {**sampling, **limits, **options}
        verdict = certify(model, flags.method, draft=flags.draft, progress=report, **settings)
    if flags.as_json:
        print_json(asdict(verdict))
    else:
        _print(verdict)
    return verdict.verdict == "holds"


def _print(verdict: SequentialVerdict) -> None:
    console = Console()
    console.print(
        f"{verdict.method} on {verdict.model} at temperature {verdict.temperature:g}: "
        f"[{COLOURS[verdict.verdict]}]{verdict.verdict}[/] "
        f"(reference: {verdict.reference}; {verdict.tokens} tokens in {verdict.sequences} "
        "sequences)",
        highlight=False,
    )
    if verdict.temperature > 0:
        _print_evidence(verdict, console)
    for difference in verdict.differences:
        why = "within rounding" if difference["explained"] else "not explained by rounding"
        console.print(
            f"  differs at token {difference['at']}: logit gap {difference['gap']}, {why}",
            highlight=False,
        )


def _print_evidence(verdict: SequentialVerdict, console: Console) -> None:
    console.print(
        f"  evidence against it {verdict.evidence:.3g}; refuted above {1 / verdict.alpha:g} "
        f"(error rate {verdict.alpha:g})"
    )
    if verdict.impossible:
        console.print(
            f"  {verdict.impossible} tokens that the reference could not have written",
            highlight=False,
        )
    console.print("  probability that a fault would have been caught by now:")
    for fault, power in verdict.power.items():
        console.print(f"    {power:6.1%}  {fault}", highlight=False)
