"""What a plan says, in plain sentences."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from paceline.planning.laws import law_text
from paceline.planning.plan_cells import ENOUGH, Forecast, Limit, PlanCell, Variation
from paceline.planning.spelling import bytes_text, count_text, network_text, seconds_text

LITTLE = 0.03  # a change of the throughput that does not matter
CLOSE = 1.05


def paragraphs(found: Forecast) -> Iterator[str]:
    yield recommendation(found)
    yield scaling(found)
    if found.variations:
        yield which_matter(found)
    if found.checked:
        yield check_text(found)
    yield basis(found)


def recommendation(found: Forecast) -> str:
    best = found.recommended
    if best is None:
        assert found.needed is not None
        return (
            f"No scheme reached {found.needed.goal} within {found.needed.limit:,} samples in the simulator, with "
            f"{_sizes(found)} workers. Tune the learning rate first (paceline compare --sweep), or lower the target."
        )
    goal = f"to {found.needed.goal}" if found.needed is not None else f"for {found.samples:,.0f} samples"
    text = (
        f"On {best.workers} workers {best.scheme} is done first: {count_text(best.rate)} samples per second, "
        f"{best.efficiency:.0%} of the ideal, {seconds_text(best.seconds or 0.0)} {goal}"
    )
    text += f", for a cost of {best.cost:,.2f}." if best.cost is not None else "."
    smallest = found.best(found.sizes[0])
    if smallest is not None and smallest.scheme != best.scheme:
        text += f" On {smallest.workers} workers it is {smallest.scheme}."
    if found.needed is None:
        text += (
            " This is throughput: it does not say how well a scheme learns, and schemes that exchange less need more "
            "samples for the same accuracy. --target counts that."
        )
        same = [one for one in ("allreduce", "sync") if one in found.schemes]
        if same and best.scheme not in same:
            first = min((found.cell(one, best.workers) for one in same), key=lambda one: one.seconds or 0.0)
            text += (
                f" Of the schemes that train exactly as one worker with a large batch {first.scheme} is the fastest: "
                f"{count_text(first.rate)} samples per second there."
            )
    elif any(one.known == "at least" for one in found.cells):
        text += (
            f" How many samples the target needs was simulated with real gradients for {_sizes(found)} workers; "
            f"beyond, times are lower bounds: more workers are taken to need at least the samples that "
            f"{found.needed.sizes[-1]} need."
        )
    return text


def scaling(found: Forecast) -> str:
    last = found.sizes[-1]
    parts = []
    for one in found.limits:
        cell = found.cell(one.scheme, last)
        if one.workers == last:
            text = f"{one.scheme} scales to {last} workers ({cell.efficiency:.0%} of the ideal there)"
        elif one.workers is None:
            text = f"{one.scheme} has less than half of the ideal at {found.sizes[0]} workers already"
        else:
            text = f"{one.scheme} has half of the ideal up to {one.workers} workers"
        parts.append(f"{text}; {bound_text(one, found)}" if one.obstacles else text)
    return f"{'. '.join(parts)}."


def bound_text(limit: Limit, found: Forecast) -> str:
    """What bounds a scheme at the largest number of workers."""
    if not limit.obstacles:
        return "nothing in particular bounds it"
    several = len(limit.obstacles) > 1 or limit.obstacles[0] in ("stragglers", "failures")
    many = f"{limit.gain:.1f} times" if limit.gain < 10 else f"{limit.gain:,.0f} times"
    names = " and ".join(obstacle_names(limit, found))
    return f"{names} {'bound' if several else 'bounds'} it ({many} the throughput without)"


def obstacle_names(limit: Limit, found: Forecast) -> list[str]:
    server = limit.scheme in found.server_schemes
    names = {
        "network": "the server's link" if server else "the network",
        "processor": "the server's processor" if server else "the processor's part of messages",
    }
    return [names.get(one, one) for one in limit.obstacles]


def which_matter(found: Forecast) -> str:
    best = found.recommended
    assert best is not None
    place = f"{best.scheme} on {best.workers} workers"
    strong = sorted(
        (one for one in found.variations if abs(one.change - 1) > LITTLE), key=lambda one: -abs(one.change - 1)
    )
    if strong:
        text = f"What matters for {place}: {', '.join(map(_change, strong[:5]))}."
    else:
        text = f"No single assumption changes the throughput of {place} by more than {LITTLE:.0%}."
    idle = [one.name for one in found.variations if one not in strong]
    if idle and strong:
        text += f" Less than {LITTLE:.0%}: {', '.join(idle)}."
    flips = [one for one in found.variations if one.flips]
    if flips:
        told = "; ".join(f"{one.best} with {one.name}" for one in flips)
        return f"{text} Another scheme would be first: {told}."
    return f"{text} No change makes another scheme the first."


def check_text(found: Forecast) -> str:
    worst = max(found.checked, key=lambda one: abs(one.error))
    mean = sum(abs(one.error) for one in found.checked) / len(found.checked)
    return (
        f"Checked on this machine, with its shared memory in place of the network: the forecast was off by {mean:.0%} "
        f"on average, and by {worst.error:+.0%} at worst ({worst.scheme}, {worst.workers} workers)."
    )


def basis(found: Forecast) -> str:
    given = found.given
    gradient = given.gradient
    how = "as given" if gradient.given else f"mean of {len(gradient.seconds)} here, on the {gradient.device}"
    spread = "" if gradient.given else f", spread {gradient.variation:.0%}, law {law_text(gradient.law)}"
    text = (
        f"Assumed: a gradient of {given.batch} samples takes {seconds_text(given.gradient_seconds)} ({how}{spread}); "
        f"the vector has {bytes_text(given.vector_bytes)}; every worker and server has a node with "
        f"{network_text(given.network)}"
    )
    if given.stragglers.factors is not None:
        text += f"; stragglers {law_text(given.stragglers.factors)}"
    if given.stragglers.share:
        text += f"; {given.stragglers.share:.0%} of the nodes {given.stragglers.slower:g} times slower"
    if found.failures.rate:
        text += (
            f"; {found.failures.rate:g} failures per node-hour, {seconds_text(found.failures.restart)} to restart, a "
            f"checkpoint every {seconds_text(found.failures.checkpoint)}"
        )
    return f"{text}."


def _change(one: Variation) -> str:
    return f"{one.name} ({one.change - 1:+.0%})"


def _sizes(found: Forecast) -> str:
    assert found.needed is not None
    sizes: Sequence[int] = found.needed.sizes
    return ", ".join(map(str, sizes))


def time_text(cell: PlanCell) -> str:
    if cell.seconds is None:
        return "not reached"
    return f"{'≥ ' if cell.known == 'at least' else ''}{seconds_text(cell.seconds)}"


def worth(cell: PlanCell) -> bool:
    return cell.efficiency >= ENOUGH
