"""Is the hub within reach? One try says so; the library would try ten times, for a minute."""

from __future__ import annotations

from pathlib import Path
from urllib.error import HTTPError
from urllib.request import Request, urlopen

from forerun.errors import BadCheckpoint

SECONDS = 10.0


def only_cached(name: str, place: str, revision: str | None = None) -> bool:
    """Must a hub id be read from the cache alone? It is refused if it is not there either."""
    problem = _why_unreachable()
    if problem is None:
        return False
    if not _is_cached(place, revision):
        known = cached_revisions(place)
        if known:
            raise BadCheckpoint(
                f"model={name!r}: the hub's cache has no revision {revision or 'main'!r} of "
                f"{place!r} (it has {', '.join(known)}), and the hub cannot be reached: {problem}."
            )
        raise BadCheckpoint(
            f"model={name!r} is no directory here, so it was taken for a hub id; it is not in the "
            f"hub's cache, and the hub cannot be reached: {problem}."
        )
    return True


def cached_revisions(place: str) -> list[str]:
    """The branches and tags of a repository that the hub's cache holds."""
    from huggingface_hub import constants

    refs = Path(constants.HF_HUB_CACHE) / f"models--{place.replace('/', '--')}" / "refs"
    return sorted(str(ref.relative_to(refs)) for ref in refs.rglob("*") if ref.is_file())


def _why_unreachable() -> str | None:
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        return "HF_HUB_OFFLINE is set"
    try:
        urlopen(Request(constants.ENDPOINT, method="HEAD"), timeout=SECONDS).close()
    except HTTPError:
        return None  # it answers
    except OSError as error:
        return f"{constants.ENDPOINT}: {getattr(error, 'reason', error)}"
    return None


def _is_cached(place: str, revision: str | None) -> bool:
    from huggingface_hub import try_to_load_from_cache

    found = try_to_load_from_cache(place, "config.json", revision=revision)
    return isinstance(found, str)
