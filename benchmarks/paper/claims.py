"""Put the DistCA paper's figures (arXiv 2510.18121) beside ours: the only place that knows them.

A verdict is one line of the checklist. Where ours differs it says why as far as we know, from our own rows where they
tell. A single figure agrees within a fifth. A range of speeds agrees when the middle of ours lies in it. What we ask of
ourselves beyond the paper, `AIMS`, is listed in the same way.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from distca.validation import UserError
from paper.check import Row

Range = tuple[float, float]

PAPER_GATHER = (0.03, 0.40)           # share of the step, fewest and most nodes
PAPER_KV_MEMORY = (0.03, 0.30)        # share of the memory, fewest and most nodes
PAPER_IDLE = {4: 0.19, 8: 0.55}       # by data-parallel size
PAPER_SATURATED_Q_LEN = 128
PAPER_SINGLE_STREAM: Range = (0.10, 0.17)
PAPER_FEWER_BYTES: Range = (0.20, 0.25)
PAPER_TOLERANCE = 0.15
PAPER_SHARDS = 31.0
PAPER_SPEED: dict[tuple[str, str, str], Range] = {  # figure, model, data -> over WLB-ideal
    ("fig9", "llama3-8b", "pretrain"): (1.07, 1.20), ("fig9", "llama3-8b", "prolong"): (1.05, 1.12),
    ("fig9", "llama-34b", "pretrain"): (1.07, 1.20), ("fig9", "llama-34b", "prolong"): (1.05, 1.12),
    ("fig10", "llama3-8b", "pretrain"): (1.15, 1.30), ("fig10", "llama3-8b", "prolong"): (1.10, 1.35),
    ("fig10", "llama-34b", "pretrain"): (1.00, 1.15), ("fig10", "llama-34b", "prolong"): (1.00, 1.25),
}

AIMS = {"of_bound": 0.95, "buffers": 0.10}
_CLOSE = 0.2        # of a single figure
_READ_OFF = 0.02    # of a speed that was read off a plot
_SATURATED = 0.8    # of the peak
_UNCHANGED = 0.02   # of a step


@dataclass(frozen=True, slots=True)
class Verdict:
    """One line of the checklist."""

    claim: str
    what: str
    paper: str
    ours: str
    setting: str
    agrees: bool
    why: str = ""  # of a difference


def _close(ours: float, paper: float) -> bool:
    return abs(ours / paper - 1) <= _CLOSE


def _within(ours: float, paper: Range, slack: float) -> bool:
    return paper[0] - slack <= ours <= paper[1] + slack


def _verdict(
    claim: str, what: str, paper: str, ours: str, setting: str, agrees: bool, why: str
) -> Verdict:
    return Verdict(claim, what, paper, ours, setting, agrees, "" if agrees else why)


def _ends(rows: Sequence[Row], field: str) -> tuple[Row, Row, str]:
    """The rows with the fewest and the most nodes, and how to name them."""
    few, many = min(rows, key=lambda row: row["nodes"]), max(rows, key=lambda row: row["nodes"])
    return few, many, f"{few[field]:.0%} → {many[field]:.0%}"


def _fig3a(rows: Sequence[Row]) -> list[Verdict]:
    few, many, ours = _ends(rows, "gather_share")
    both = f"{few['gather_and_scatter_share']:.0%} → {many['gather_and_scatter_share']:.0%}"
    agrees = all(_close(row["gather_share"], paper) for row, paper in zip((few, many), PAPER_GATHER, strict=True))
    return [_verdict(
        "fig3a", "per-document CP: key all-gather, share of the step",
        f"~{PAPER_GATHER[0]:.0%} → ~{PAPER_GATHER[1]:.0%}", ours, _nodes(few, many), agrees,
        f"with the reduce-scatter of their gradients ours is {both}, and {many['exposed_share_of_chunks']:.0%} on the "
        "most nodes where chunks hide the rest; the paper's batch is not public")]


def _fig3b(rows: Sequence[Row]) -> list[Verdict]:
    few, many, ours = _ends(rows, "kv_memory_share")
    agrees = all(_close(row["kv_memory_share"], paper) for row, paper in zip((few, many), PAPER_KV_MEMORY, strict=True))
    return [_verdict(
        "fig3b", "per-document CP: gathered keys, share of the last rank's memory",
        f"~{PAPER_KV_MEMORY[0]:.0%} → ~{PAPER_KV_MEMORY[1]:.0%}", ours, _nodes(few, many), agrees,
        "same growth; beside the keys we count only what backward needs, so whatever a framework holds beyond that "
        "would make their share smaller")]


def _nodes(few: Row, many: Row) -> str:
    return f"{few['model']}, {_length(few['context'])}, {few['data']}, 64K tokens a node, {few['nodes']} → " \
           f"{many['nodes']} nodes"


def _fig4b(rows: Sequence[Row]) -> list[Verdict]:
    found = []
    for data in _values(rows, "data"):
        here = {row["dp"]: row["attention_idle_share"] for row in rows
                if row["data"] == data and row["dp"] in PAPER_IDLE and row["attention_idle_share"] is not None}
        ours = " / ".join(f"{idle:.0%}" for idle in here.values()) or "fits no batch"
        found.append(_verdict(
            "fig4b", "variable-length chunks: attention that waits, "
            + " / ".join(f"DP={dp}" for dp in here or PAPER_IDLE),
            " / ".join(f"{PAPER_IDLE[dp]:.0%}" for dp in here or PAPER_IDLE), ours,
            f"llama3-8b, 512K, {data}, one sequence and 4 nodes a replica", bool(here) and all(
                _close(idle, PAPER_IDLE[dp]) for dp, idle in here.items()),
            "grows with DP as the paper's does; how many documents of the whole context a batch holds decides the "
            "figure, and the paper's replicas and batch are not public"))
    return found


def _fig4a(rows: Sequence[Row]) -> list[Verdict]:
    found = []
    for data in _values(rows, "data"):
        here = [row for row in rows if row["data"] == data and row["activations_max_over_mean"] is not None]
        spread = [row["activations_max_over_mean"] for row in here]
        found.append(_verdict(
            "fig4a", "variable-length chunks: fullest replica's activations over the mean, DP="
            + ", ".join(str(row["dp"]) for row in here),
            "grows with DP", ", ".join(f"{value:.2f}" for value in spread),
            f"llama3-8b, 512K, {data}, one sequence and 4 nodes a replica",
            len(spread) > 1 and spread[-1] > spread[0],
            "the memory of a GPU caps how far token counts may diverge"))
    return found


def _fig5(rows: Sequence[Row]) -> list[Verdict]:
    here = next(row for row in rows if row["q_len"] == PAPER_SATURATED_Q_LEN)
    enough = next(row["q_len"] for row in rows if row["backward_of_peak"] >= _SATURATED)
    where = f"measured H200 table, shards before {_length(here['kv_len'])} keys"
    return [
        _verdict("fig5", "attention forward of 128-token shards, of the peak", "saturated",
                 f"{here['forward_of_peak']:.0%} ({here['forward_tflops']:.0f} TFLOP/s)", where,
                 here["forward_of_peak"] >= _SATURATED, "short shards run slower on this kernel"),
        _verdict("fig5", "attention backward of 128-token shards, of the peak", "saturated",
                 f"{here['backward_of_peak']:.0%} ({here['backward_tflops']:.0f} TFLOP/s)", where,
                 here["backward_of_peak"] >= _SATURATED,
                 f"backward needs {enough} queries for {_SATURATED:.0%} of its peak on this kernel")]


def _speeds(figure: str, rows: Sequence[Row]) -> list[Verdict]:
    found = []
    for model in _values(rows, "model"):
        for data in _values(rows, "data"):
            here = [row for row in rows if (row["model"], row["data"]) == (model, data)]
            found += _speed_verdicts(figure, model, data, [row for row in here if row["distca"] is not None],
                                     [row for row in here if row["distca"] is None])
    return [*found, _bound_verdict(figure, rows)]


def _speed_verdicts(figure: str, model: str, data: str, rows: list[Row], left_out: list[Row]) -> list[Verdict]:
    paper = PAPER_SPEED[figure, model, data]
    said = f"{paper[0]:.2f}–{paper[1]:.2f}×" if paper[0] > 1 else f"up to {paper[1]:.2f}×"
    where = f"{model}, {data}, {_settings(rows)}" + (f" ({len(left_out)} do not fit)" if left_out else "")
    if not rows:
        return [Verdict(figure, "speed over WLB-ideal", said, "fits no setting", where, False, "memory")]
    given, placed = (sorted(row[name] for row in rows) for name in ("disaggregated", "distca"))
    below = [row for row in rows if row["distca"] < paper[0]]
    return [
        _verdict(figure, "disaggregated over WLB-ideal", said, _spread(given), where,
                 _within(median(given), paper, _READ_OFF), _given_why(median(given), paper, rows)),
        _verdict(figure, "distca over WLB-ideal, to reach both ends", said, _spread(placed), where,
                 not below and placed[-1] >= paper[1], _placed_why(below, placed[-1], paper))]


def _given_why(middle: float, paper: Range, rows: Sequence[Row]) -> str:
    if middle > paper[1]:
        waits = median(row["wlb_ideal_exposed_share"] for row in rows)
        return f"more to gain: {waits:.0%} (median) of WLB-ideal's step as simulated are for keys that its attention " \
               "does not hide"
    return _below_why([row for row in rows if row["disaggregated"] < paper[0]], paper)


def _placed_why(below: Sequence[Row], best: float, paper: Range) -> str:
    return _below_why(below, paper) if below else f"the best setting reaches {best:.2f}×"


def _below_why(below: Sequence[Row], paper: Range) -> str:
    """Where ours stays below the paper's lower end, and what leaves no more to gain there."""
    level = sum(row["wlb_ideal_seconds"] < row["bound_seconds"] * paper[0] for row in below)
    near = f"in {level} of {len(below)} WLB-ideal is too near the bound for anyone to gain so much; " if level else ""
    return f"below in {_places(below)}: {near}{_gap(below)}"


def _bound_verdict(figure: str, rows: Sequence[Row]) -> Verdict:
    here = [row for row in rows if row["distca_of_bound"] is not None]
    aim = AIMS["of_bound"]
    far = [row for row in here if row["distca_of_bound"] < aim]
    shares = sorted(row["distca_of_bound"] for row in here)
    return _verdict(
        figure, "distca of the bound (our aim)", f"≥ {aim:.0%}", _spread(shares, percent=True),
        f"all {_settings(here)}", not far,
        f"below in {len(far)} of {len(here)}, as {_places(far)}: {_gap(far)}")


def _gap(rows: Sequence[Row]) -> str:
    """What distca's step has beyond the bound's, on average over rows."""
    if not rows:
        return ""
    step, one_byte, free = (sum(1 / row[name] - 1 for row in rows) / len(rows) for name in
                            ("distca_of_bound", "one_byte_of_bound", "free_links_of_bound"))
    return (f"distca takes {step:.1%} longer than the bound, {max(step - one_byte, 0):.1%} for attention's transfers, "
            f"{max(one_byte - free, 0):.1%} for weights and gradients, {free:.1%} for imbalance, short shards and "
            "bubbles")


def _fig11(rows: Sequence[Row]) -> list[Verdict]:
    here = [row for row in rows if row["placement"] == "given"]
    placed = [row["single_stream_over"] - 1 for row in rows if row["placement"] == "balanced"]
    alone, one_byte = sorted(row["single_stream_over"] - 1 for row in here), [row["one_byte_over"] for row in here]
    low, high = PAPER_SINGLE_STREAM
    where = f"{_models(here)}, 128K, pretrain, {_settings(here)}, disaggregated"
    return [
        _verdict("fig11", "single stream costs", f"+{low:.0%} to +{high:.0%}",
                 f"{alone[0]:+.0%} to {alone[-1]:+.0%}", where,
                 _within(median(alone), (low * (1 - _CLOSE), high * (1 + _CLOSE)), 0.0),
                 f"smaller models hide less; placing documents too leaves {min(placed):+.0%} to {max(placed):+.0%}"),
        _verdict("fig11", "one-byte transfers, of the full step", "equal",
                 f"{min(one_byte):.1%} to {max(one_byte):.1%}", where, min(one_byte) >= 1 - _UNCHANGED,
                 "where a rank has few tokens, weights and gradients share the links with attention's transfers")]


def _fig12(rows: Sequence[Row]) -> list[Verdict]:
    here = [row for row in rows if row["placement"] == "given" and row["tolerance"] == PAPER_TOLERANCE]
    fewer, seconds = sorted(1 - row["bytes_over"] for row in here), [row["seconds_over"] - 1 for row in here]
    low, high = PAPER_FEWER_BYTES
    where = f"{_models(here)}, 128K, pretrain, {_settings(here)}, disaggregated"
    return [
        _verdict("fig12", f"bytes at tolerance {PAPER_TOLERANCE} against 0", f"−{low:.0%} to −{high:.0%}",
                 f"−{fewer[0]:.0%} to −{fewer[-1]:.0%}", where,
                 _within(median(fewer), (low * (1 - _CLOSE), high * (1 + _CLOSE)), 0.0),
                 "our scheduler does not send keys twice, so less is left to save"),
        _verdict("fig12", f"step at tolerance {PAPER_TOLERANCE} against 0", "unchanged",
                 f"{min(seconds):+.1%} to {max(seconds):+.1%}", where, max(seconds) <= _UNCHANGED,
                 "exchanges are hidden already at 0, so fewer bytes gain nothing, while the fullest server may take "
                 f"{PAPER_TOLERANCE:.0%} more attention than the mean and everyone waits for it")]


def _app_a(rows: Sequence[Row]) -> list[Verdict]:
    here = next(row for row in rows if row["model"] == "llama-34b" and row["tp"] == 1)
    return [_verdict("appA", "shards of a document with hidden communication", f"≈ {PAPER_SHARDS:.0f}",
                     f"{here['shards']:.1f}", "llama-34b, 50 GB/s a GPU, peak FLOP/s",
                     _close(here["shards"], PAPER_SHARDS), "other shapes or rates")]


def _memory(rows: Sequence[Row]) -> list[Verdict]:
    spread = max(row["activations_max_over_min"] for row in rows)
    share, aim = max(row["buffers_of_activations"] for row in rows), AIMS["buffers"]
    where = f"{len(rows) // 2} settings of fig9 and fig10, both forms of ours"
    return [
        _verdict("memory", "activations, fullest over emptiest rank of a stage", "balanced", f"{spread:.3f}", where,
                 spread == 1.0, "tokens do not divide over the ranks"),
        _verdict("memory", "exchange buffers, of activations (our aim)", f"≤ {aim:.0%}", f"at most {share:.1%}", where,
                 share <= aim, "few layers or tokens a rank, so that activations are small beside what travels")]


def _values(rows: Sequence[Row], field: str) -> list[str]:
    return list(dict.fromkeys(row[field] for row in rows))


def _settings(rows: Sequence[Row]) -> str:
    return f"{len(rows)} setting{'' if len(rows) == 1 else 's'}"


def _models(rows: Sequence[Row]) -> str:
    return " and ".join(_values(rows, "model"))


def _length(tokens: int) -> str:
    return f"{tokens // 1024}K"


def _spread(values: Sequence[float], percent: bool = False) -> str:
    low, middle, high = (f"{value:.1%}" if percent else f"{value:.2f}" for value in
                         (values[0], median(values), values[-1]))
    return f"{low}–{high}{'' if percent else '×'}, median {middle}"


def _places(rows: Sequence[Row]) -> str:
    places = list(dict.fromkeys(f"{row['model']} {row['nodes']} nodes × {_length(row['context'])}" for row in rows))
    return ", ".join(places[:3]) + (f" and {len(places) - 3} more" if len(places) > 3 else "")


CLAIMS: dict[str, tuple[str, Callable[[Sequence[Row]], list[Verdict]]]] = {  # claim -> figure whose rows it reads
    "fig3a": ("fig3", _fig3a), "fig3b": ("fig3", _fig3b), "fig4a": ("fig4", _fig4a), "fig4b": ("fig4", _fig4b),
    "fig5": ("fig5", _fig5), "fig9": ("fig9", lambda rows: _speeds("fig9", rows)),
    "fig10": ("fig10", lambda rows: _speeds("fig10", rows)), "fig11": ("fig11", _fig11), "fig12": ("fig12", _fig12),
    "appA": ("appA", _app_a), "memory": ("memory", _memory),
}


def figures_of(claims: Sequence[str]) -> tuple[str, ...]:
    """The figures that these claims read, or a ValueError for one that is unknown."""
    for claim in claims:
        if claim not in CLAIMS:
            raise UserError(f"only has {claim!r}; choose from: {', '.join(CLAIMS)}")
    return tuple(dict.fromkeys(CLAIMS[claim][0] for claim in claims))


def verdicts(claims: Sequence[str], rows: dict[str, list[Row]]) -> list[Verdict]:
    return [verdict for claim in CLAIMS if claim in claims for verdict in CLAIMS[claim][1](rows[CLAIMS[claim][0]])]


def marks() -> dict[str, Any]:
    """The paper's figures for the plots."""
    return {"gather": PAPER_GATHER, "kv_memory": PAPER_KV_MEMORY, "idle": PAPER_IDLE,
            "saturated_q_len": PAPER_SATURATED_Q_LEN, "speed": PAPER_SPEED, "single_stream": PAPER_SINGLE_STREAM,
            "fewer_bytes": PAPER_FEWER_BYTES, "tolerance": PAPER_TOLERANCE, "shards": {"llama-34b": PAPER_SHARDS},
            "buffers": AIMS["buffers"]}
