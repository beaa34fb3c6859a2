"""What a test of losslessness has shown, in plain words."""

from typing import TextIO

from rich.padding import Padding

from headstart.infer.measure.lossless import Divergence, Greedy, Sampled

from .console import plain_console

_EXPLAINED = 5  # divergences described one by one


def print_verdict(greedy: Greedy, sampled: Sampled, out: TextIO) -> None:
    """Print what was shown: colours on a terminal, plain text anywhere else."""
    console = plain_console(out)
    for holds, title, said in (
        (greedy.holds, "Greedy text", greedy_sentences(greedy)),
        (sampled.holds, f"Sampled text, rule {sampled.rule}", sampled_sentences(sampled)),
    ):
        console.print()
        console.print(
            f"{title}: {'holds' if holds else 'DIFFERS'}", style="green" if holds else "red"
        )
        for sentence in said:
            console.print(Padding(sentence, (0, 0, 0, 2)))


def greedy_sentences(greedy: Greedy) -> list[str]:
    """What the comparison with `generate` showed."""
    apart = greedy.divergences
    if not apart:
        return [
            f"All {greedy.tokens:,} tokens of {greedy.prompts} prompts are those of generate, in "
            f"{greedy.dtype}."
        ]
    near = sum(divergence.near_tie for divergence in apart)
    said = [
        f"{len(apart)} of {greedy.prompts} texts leave generate's, in {greedy.dtype}; "
        f"{greedy.tokens:,} tokens agree before that. {near} of them at a near-tie, where the "
        "margin is at most twice what plain decoding differs from itself in another shape."
    ]
    said += [_explained(divergence) for divergence in apart[:_EXPLAINED]]
    if len(apart) > _EXPLAINED:
        said.append(f"… and {len(apart) - _EXPLAINED} more.")
    said.append(
        f"Plain decoding leaves its own text in {greedy.plain_divergences} of {greedy.prompts} "
        f"prompts in a batch of copies or as one forward ({greedy.plain_tokens:,} tokens agree): "
        f"{_rate(greedy.plain_divergences or 0, greedy.plain_tokens)} against "
        f"{_rate(len(apart), greedy.tokens)} here."
    )
    return said


def sampled_sentences(sampled: Sampled) -> list[str]:
    """What the test of sampling showed."""
    said = []
    if sampled.approximate:
        said.append(
            f"The rule {sampled.rule} is approximate by design: it keeps likely text, not the "
            "target's distribution."
        )
    if sampled.seeded_tokens:
        said.append(
            f"Against plain decoding with the same seeds {sampled.seeded_differences} texts "
            f"differ; {sampled.seeded_tokens:,} tokens are the same."
        )
    if sampled.seeded_differences and sampled.holds:
        said.append(f"In {sampled.dtype} rounding turns near-ties, with and without a drafter.")
    agrees = "agrees with" if sampled.agrees else "is not"
    said.append(
        f"Over {sampled.draws:,} texts of one prompt the joint distribution of the first "
        f"{sampled.places} tokens {agrees} the target's: chi-square {sampled.statistic:.1f} over "
        f"{sampled.bins} bins, p = {sampled.p_value:.2g}."
    )
    said.append(
        f"The total variation over these bins was {sampled.distance:.3f}, and is at most "
        f"{sampled.bound:.3f} with all but one chance in a million. More draws bound it more "
        "tightly."
    )
    return said


def _explained(divergence: Divergence) -> str:
    kind = "near-tie" if divergence.near_tie else "NOT a near-tie"
    return (
        f"prompt {divergence.prompt}, new token {divergence.place}: the two best logits are "
        f"{divergence.margin:.3g} apart, the two runs {divergence.difference:.3g}, plain runs up "
        f"to {divergence.noise:.3g}: {kind}."
    )


def _rate(apart: int, tokens: int) -> str:
    return f"{100_000 * apart / max(tokens, 1):.0f} in 100,000 tokens"
