"""What an option is if nobody says, and which numbers it takes: part of the interface."""

from dataclasses import MISSING, fields

from forerun import registry
from forerun.errors import ForerunError
from forerun.methods.lookahead import LookaheadOptions

PROBES = (-1, 0, 1, 2, 3, 5, 6, 0.5, 1.5)

# of every option its default, and behind a colon which of the probes it takes
EXPECTED = """
auto most=16: 1 2 3 5 6
auto learn=True:
speculative k=None: 1 2 3 5 6
lookup k=None: 1 2 3 5 6
predicted k=None: 1 2 3 5 6
assd k=None: 1 2 3 5 6
assd ahead=whole:
stepwise block=8: 1 2 3 5 6
stepwise cache=none:
stepwise refresh=8: 1 2 3 5 6
stepwise order=confidence:
steps block=8: 1 2 3 5 6
steps cache=none:
steps refresh=8: 1 2 3 5 6
steps order=confidence:
steps steps=8: 1 2 3 5 6
threshold block=8: 1 2 3 5 6
threshold cache=none:
threshold refresh=8: 1 2 3 5 6
threshold threshold=0.9: 0 1 0.5
entropy-bounded block=8: 1 2 3 5 6
entropy-bounded cache=none:
entropy-bounded refresh=8: 1 2 3 5 6
entropy-bounded bound=0.5: 0 1 2 3 5 6 0.5 1.5
ssd drafts=4: 0 1 2 3 5
ssd tree=auto:
ssd canvases=None:
ssd worth=0.0: 0 1 0.5
ssd block=8: 1 2 3 5 6
ssd cache=none:
ssd refresh=8: 1 2 3 5 6
ssd order=confidence:
ancestral steps=32: 1 2 3 5 6
specdiff k=None: 1 2 3 5 6
specdiff-confidence k=None: 1 2 3 5 6
specdiff-ddpm k=None: 1 2 3 5 6
jacobi block=None: 1 2 3 5 6
jacobi start=repeat:
jacobi refill=True:
multiblock block=16: 1 2 3 5 6
multiblock start=repeat:
multiblock refill=False:
multiblock blocks=2: 1 2 3 5 6
multiblock spawn=0.85: 0 1 0.5
multiblock candidates=3: 0 1 2 3 5 6
multiblock share=False:
lookahead window=10: 1 2 3 5 6
lookahead ngram=5: 3 5 6
lookahead guesses=10: 1 2 3 5 6
block block=None: 1 2 3 5 6
block sub_block=None: 1 2 3 5 6
block causal=nothing:
block edit=None: 0 1 0.5
block post_edits=16: 0 1 2 3 5 6
block schedule=dynamic:
block threshold=0.9: 0 1 0.5
block steps=None:
block-stepwise block=None: 1 2 3 5 6
block-stepwise sub_block=None: 1 2 3 5 6
block-stepwise causal=nothing:
block-ssd drafts=4: 0 1 2 3 5
block-ssd tree=auto:
block-ssd canvases=None:
block-ssd worth=0.0: 0 1 0.5
block-ssd block=None: 1 2 3 5 6
block-ssd sub_block=None: 1 2 3 5 6
block-ssd causal=nothing:
s2d2 threshold=0.9: 0 1 0.5
s2d2 router=span:
s2d2 span=1: 1 2 3 5 6
s2d2 estimator=entropy:
s2d2 strength=None: 1 2 3 5 6 0.5 1.5
s2d2 score=None:
s2d2 cost=1.0: -1 0 1 2 3 5 6 0.5 1.5
s2d2 enough=0.0: -1 0 1 2 3 5 6 0.5 1.5
s2d2 on=2.0: 1 2 3 5 6 1.5
s2d2 off=1.0: -1 0 1 2 0.5 1.5
s2d2 explore=0.5: 0 1 2 3 5 6 0.5 1.5
s2d2 bins=2,2,2:
s2d2 block=None: 1 2 3 5 6
s2d2 sub_block=None: 1 2 3 5 6
s2d2 causal=nothing:
s2d2 edit=None: 0 1 0.5
s2d2 post_edits=16: 0 1 2 3 5 6
s2d2 ratio_power=1.0: 1 2 3 5 6 0.5 1.5
s2d2 accept=law:
s2d2 config=None:
s2d2-exact k=None: 1 2 3 5 6
s2d2-exact ahead=whole:
s2d2-canvases threshold=0.9: 0 1 0.5
s2d2-canvases router=span:
s2d2-canvases span=1: 1 2 3 5 6
s2d2-canvases estimator=entropy:
s2d2-canvases strength=None: 1 2 3 5 6 0.5 1.5
s2d2-canvases score=None:
s2d2-canvases cost=1.0: -1 0 1 2 3 5 6 0.5 1.5
s2d2-canvases enough=0.0: -1 0 1 2 3 5 6 0.5 1.5
s2d2-canvases on=2.0: 1 2 3 5 6 1.5
s2d2-canvases off=1.0: -1 0 1 2 0.5 1.5
s2d2-canvases explore=0.5: 0 1 2 3 5 6 0.5 1.5
s2d2-canvases bins=2,2,2:
s2d2-canvases drafts=4: 0 1 2 3 5
s2d2-canvases tree=auto:
s2d2-canvases canvases=None:
s2d2-canvases worth=0.0: 0 1 0.5
s2d2-canvases block=None: 1 2 3 5 6
s2d2-canvases sub_block=None: 1 2 3 5 6
s2d2-canvases causal=nothing:
assd-tolerant k=None: 1 2 3 5 6
assd-tolerant ahead=whole:
assd-tolerant tolerance=0.01: 0 1 0.5
draft model draft_temperature=1.0: 1 2 3 5 6 0.5 1.5
draft lookup ngram=3: 1 2 3 5 6
draft lookup adapt=True:
draft predicted prediction=():
draft predicted adapt=True:
draft diffusion steps=1: 1 2 3 5 6
draft diffusion keep=False:
draft diffusion adapt=False:
draft diffusion draft_temperature=1.0: 1 2 3 5 6 0.5 1.5
draft diffusion first=0: 0 1 2 3 5 6
draft diffusion first_draft=lookup:
draft diffusion opening=None: -1 0 1 2 3 5 6 0.5 1.5
draft diffusion-confidence steps=2: 1 2 3 5 6
draft diffusion-confidence keep=False:
draft diffusion-confidence adapt=False:
draft diffusion-confidence draft_temperature=1.0: 1 2 3 5 6 0.5 1.5
draft diffusion-confidence first=0: 0 1 2 3 5 6
draft diffusion-confidence first_draft=lookup:
draft diffusion-confidence opening=None: -1 0 1 2 3 5 6 0.5 1.5
draft ddpm_cache steps=2: 1 2 3 5 6
draft ddpm_cache keep=False:
draft ddpm_cache adapt=False:
draft ddpm_cache draft_temperature=1.0: 1 2 3 5 6 0.5 1.5
draft ddpm_cache first=0: 0 1 2 3 5 6
draft ddpm_cache first_draft=lookup:
draft ddpm_cache opening=None: -1 0 1 2 3 5 6 0.5 1.5
draft features adapt=False:
draft features draft_temperature=1.0: 1 2 3 5 6 0.5 1.5
"""


def described():
    for name in registry.BUILT_IN["methods"]:
        yield from lines_of(name, registry.method_named(name).options)
    for name in registry.BUILT_IN["drafters"]:
        yield from lines_of(f"draft {name}", registry.get("drafters", name))


def lines_of(name, options):
    needed = {f.name: None for f in fields(options) if f.default is MISSING and f.init}
    for field in fields(options):
        if field.init and field.name not in needed:
            taken = [n for n in PROBES if takes(options, {**needed, field.name: n})]
            numbers = "".join(f" {n}" for n in taken)
            yield f"{name} {field.name}={field.default}:{numbers}"


def takes(options, values):
    try:
        options(**values)
    except ForerunError:
        return False
    return True


def test_options_have_the_defaults_and_the_bounds_that_they_had():
    assert list(described()) == EXPECTED.strip().splitlines()


def test_lookahead_may_ask_for_as_many_rows_as_a_lane_has_for_tails():
    full = {"window": 32, "guesses": 32, "ngram": 5}  # 64 tails of 4 tokens
    assert takes(LookaheadOptions, full) and not takes(LookaheadOptions, full | {"window": 33})
