"""Write docs/reference/measured.md from the JSON that the benchmarks wrote, so that no figure of it is typed by hand.

    python benchmarks/measured_page.py            # after a benchmark wrote new results
    python benchmarks/measured_page.py --check    # says whether the page is what the results say
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from textwrap import fill
from typing import Any

RESULTS = Path(__file__).parent / "results"
PAGE = Path(__file__).parents[1] / "docs" / "reference" / "measured.md"
RANKS = (64, 512, 4096)
CASES = {
    "1 of 32768 | 32/8": "1 document of 32K", "4 of 8192": "4 documents of 8K", "32 of 1024": "32 documents of 1K",
    "uneven documents": "8 uneven documents, 17 to 20,001",
    "8 x q=4096": "8 shards q=4096, kv=16K, keys of their own",
    "64 x q=512": "64 shards q=512, kv=16K, keys of their own",
    "64 x q=128 kv=16384, own": "64 shards q=128, kv=16K, keys of their own",
    "64 x q=128 kv=16384, shared": "the same, keys shared",
    "uneven shards": "10 uneven shards, q to 8,192, kv to 64K", "2 x q=128": "2 shards q=128, kv=512K",
    "plan, median": "a plan's median server", "plan, most": "its most fragmented server",
    "1 of 32768 | 4/1": "1 document of 32K, 4/1 heads", "1 of 32768 | 8/1": "1 document of 32K, 8/1 heads",
    "dim 64": "1 document of 32K, 32/32 heads, dim 64", "dim 256": "1 document of 16K, dim 256",
    "dim 192/128": "1 document of 16K, dim 192, values 128",
}
KERNELS = {"hopper": "distca", "before": "distca, the version before", "fa4": "FlashAttention-4",
           "cudnn": "cuDNN packed", "varlen": "torch's packed FlashAttention-2"}


def page(results: Path = RESULTS) -> str:
    """The whole page."""
    parts = (planning, reference, nodes, attention, runtime, training_on_a_gpu, long_document, training, corpora,
             pipeline, overlap, adapted, servers, restarts, links, integrations, transformers_on_a_gpu, stages,
             simulated, trusted, report_page)
    blocks = "\n\n".join([HEAD, *(part(results) for part in parts)]).split("\n\n")
    return "\n\n".join(block if block.startswith(("#", "|")) else wrapped(block) for block in blocks) + "\n"


def wrapped(block: str) -> str:
    return fill(" ".join(block.split()), 120, break_long_words=False, break_on_hyphens=False)


HEAD = """\
# What was measured

Made by `python benchmarks/measured_page.py` from the JSON that the benchmarks wrote, never by hand. Every comparison
was measured in one run, as a ratio. `make bench` measures the planner on your machine, and each benchmark named below
prints its table and writes its JSON."""


def planning(results: Path) -> str:
    rows = {(row["ranks"], row["placement"]): row for row in _read(results, "planner_sampled")["rows"]}
    table = [[f"{ranks:,}", placement, f"{row['work_max_over_mean_before']:.1f}", f"{row['work_max_over_mean']:.2f}",
              f"{row['bytes_total'] / 1e9:.0f}", f"{row['bytes_sent_max'] / 1e9:.1f}",
              f"{1e3 * row['plan_seconds']:.0f} ms"]
             for ranks in RANKS for placement in ("given", "balanced") for row in (rows[ranks, placement],)]
    heads = ("ranks", "placement", "slowest / mean before", "after", "GB in all", "GB from the busiest sender",
             "planning")
    return ("## Plans\n\nAt tolerance 0.05, llama3-8b, 65,536 tokens per rank, prolong lengths, one core. Bytes are "
            f"forward, one layer, bf16 ({_source('planner_sampled')}, `benchmarks/planner.py "
            f"--sweep`).\n\n{_table(heads, table)}")


def reference(results: Path) -> str:
    content = _read(results, "planner")
    given, balanced = content["summary"]["given"], content["summary"]["balanced"]
    ratios = [f"{side['ratios'][name]['median']:.2f}" for name in ("bytes_total", "bytes_sent_max")
              for side in (given, balanced)]
    theirs = [row["work_max_over_mean"] / row["ratios"]["imbalance"] for row in content["rows"]]
    ranks = [row["ranks"] for row in content["rows"]]
    worst = max(side["work_max_over_mean_worst"] for side in (given, balanced))
    return (f"Against the public reference planner of the paper's authors on {given['rows']} fixed batches of "
            f"{min(ranks)} to {max(ranks)} ranks at the same tolerance ({_source('planner')}): the median of our "
            f"bytes over theirs is {ratios[0]} with given placement and {ratios[1]} with balanced, of the busiest "
            f"sender's {ratios[2]} and {ratios[3]}. Ours stays within {worst:.2f} of the mean on every batch, theirs "
            f"reaches {min(theirs):.2f} to {max(theirs):.2f}.")


def nodes(results: Path) -> str:
    content = _read(results, "nodes")
    table = [[placement, f"{found['between_nodes_over_flat_median']:.2f}×",
              f"{found['between_nodes_over_flat_max']:.2f}×", f"{found['total_over_flat_max']:.2f}×",
              f"{found['work_max_over_mean']:.2f}"] for placement, found in content["summary"].items()]
    heads = ("placement", "bytes between nodes, median", "worst", "bytes in all, worst", "max/mean, worst")
    return (f"## Inside nodes\n\n{content['settings']['ranks_per_node']} ranks to a node, 32 to 512 ranks of 64K "
            "tokens, sequences of 64K and of 512K tokens of prolong lengths, tolerance 0.05: plans by levels, whose "
            "bytes cross once per node, over flat plans of the same documents and placement, which cross once per rank "
            f"({_source('nodes')}, `benchmarks/nodes.py`).\n\n" + _table(heads, table))


def attention(results: Path) -> str:
    content = _read(results, "kernel_rows_nvidia_h200")
    kernels = {name: said for name, said in KERNELS.items() if name in content["rows"][0]["contestants"]}
    table = []
    for name, said in CASES.items():
        row = next((row["contestants"] for row in content["rows"] if name in row["case"]), None)
        if row is None:  # the run was of other cases
            continue
        table.append([said, *(f"{row[kernel]['forward_tflops']:.0f} / {row[kernel]['backward_tflops']:.0f}"
                              if "problem" not in row[kernel] else "" for kernel in kernels)])
    device = content["about"]["device"]
    return (f"## Attention on a GPU\n\nForward / backward TFLOP/s on one {device} in bf16, 32 query heads, 8 KV heads "
            "and dim 128 unless said, with our own kernel for attention tasks, in which keys that several tasks share "
            f"cost nothing extra. All in one run, in turns ({_source('kernel_rows_nvidia_h200')}, "
            "`benchmarks/kernel_rows.py`;\n[kernels](../design/kernels.md) has the "
            f"rest).\n\n{_table(('batch', *kernels.values()), table)}")


def runtime(results: Path) -> str:
    (cpu,), tables, gpu = (_read(results, f"runtime_{name}")["rows"] for name in ("cpu", "tables", "gpu"))
    built = {row["placement"]: f"{1e3 * row['build_seconds']:.1f} ms" for row in tables}
    shares = [100 * row["copy_share"] for row in gpu]
    return (f"## The runtime\n\nTwo CPU ranks, one with a document of {_tokens(cpu['document'])} and one with as many "
            f"tokens in documents of {cpu['short']}: attention forward and backward is {cpu['speedup']:.2f}× faster "
            f"with the plan than at home ({_source('runtime_cpu')}, `benchmarks/runtime.py --cpu`). One rank's "
            f"dispatch tables for {tables[0]['ranks']} ranks take {built['given']} given and {built['balanced']} "
            f"balanced ({_source('runtime_tables')}, `--tables`). On one H200 with 65,536 tokens a rank, packing, "
            f"unpacking and merging take {min(shares):.1f} to {max(shares):.1f} % of the attention's time, the "
            f"busiest rank of 64 included ({_source('runtime_gpu')}).")


def training_on_a_gpu(results: Path) -> str:
    content = _read(results, "train_gpu")
    alone = {row["vocab"]: row for row in content["alone"]}
    table = [[f"{row['vocab']:,}", row["way"], f"{row['tokens_per_second']:,.0f}",
              f"{100 * row['model_flops_utilization']:.1f} %", f"{100 * row['alone_over_step']:.1f} %",
              f"{row['memory_bytes'] / 2**30:.0f}", str(row["graphs_after_warm_up"])] for row in content["rows"]]
    said = " and ".join(f"{row['seconds']:.3f} s ({row['flops_per_second'] / 1e12:.0f} TFLOP/s) with {vocab:,}"
                        for vocab, row in alone.items())
    return (f"## Training steps on a GPU\n\n{content['options']['layers']} layers of llama3-8b on one "
            f"{content['host']['device']}, {sum(content['options']['lengths']):,} packed tokens a step, AdamW, with "
            "two vocabularies. *Alone* is the time of the step's matrix products and attention calls by themselves, in "
            f"the same run: {said}. New graphs are what {len(content['options']['others'])} batches of other lengths "
            f"compiled after the warm-up ({_source('train_gpu')}, `benchmarks/train_gpu.py`).\n\n" + _table(
                ("vocabulary", "", "tokens/s", "MFU", "alone / step", "GiB", "new graphs"), table))


def long_document(results: Path) -> str:
    content = _read(results, "long_document")
    table = [[str(row["layers"]), f"{row['tokens']:,}", row["attention"], f"{row['host_bytes'] / 1e9:.1f}",
              f"{row['memory_bytes'] / 2**30:.1f}", f"{row['step_seconds']:.0f} s", f"{row['loss']:.4f}"]
             for row in content["rows"]]
    return (f"One document, llama3.2-1b with `model.recompute` full on one {content['host']['device']}. A causal step "
            "of all layers at a million tokens takes many minutes and was not run whole: all layers ran it with "
            "attention through a window, which keeps, sends and fetches the same tensors, and one layer ran it causal. "
            f"Rows with host memory use `model.offload` and tiles of {content['options']['tile']:,} tokens. "
            "Seconds are of a first step, with compiling and pinning of host memory "
            f"({_source('long_document')}, `benchmarks/long_document.py`).\n\n" + _table(
                ("layers", "tokens", "attention", "GB on the host", "peak GiB on the GPU", "first step", "loss"),
                table))


def training(results: Path) -> str:
    content = _read(results, "train_step")
    return ("## Training steps on a CPU\n\nA whole training step of two CPU ranks, one with documents of "
            f"{_tokens(content['options']['tokens'] // 2)} and one with as many tokens of short "
            f"ones:\n{content['speedup']:.2f}× the tokens/s of attention at home, documents where the loader puts "
            f"them, {_loss(content['largest_loss_difference'])} ({_source('train_step')}, `benchmarks/train_step.py`).")


def corpora(results: Path) -> str:
    content = _read(results, "corpora")
    speed = {(kind, row["what"]): row for kind in ("tokenizing", "loading") for row in content[kind]}
    tokenized, loaded = speed["tokenizing", "cached corpus"], speed["loading", "cached corpus"]
    large = content["memory"][-2:]
    added = max(0, *(row["added_bytes"] for row in large))
    return (f"A corpus in `data.cache`, on {_cores(content)}: JSON lines become a cache at "
            f"{tokenized['cpu_ratio']:.2f}× the speed of `encode_batch` alone by CPU seconds, and batches are loaded "
            f"from it at {loaded['cpu_ratio']:.2f}× the speed of memory. {large[0]['corpus_bytes'] / 1e9:.1f} GB of "
            f"text, {large[0]['corpus_tokens'] / 1e9:.1f} billion tokens as bytes, add at most {added / 1e6:.0f} MB to "
            f"what is private to a rank, over a corpus of {content['memory'][0]['corpus_bytes'] / 1e6:.0f} MB "
            f"({_source('corpora')}, `benchmarks/corpora.py`).")


def pipeline(results: Path) -> str:
    content = _read(results, "pipeline")
    gain = {(row["variant"], row["micro_batches"]): row["gain"] for row in content["speed"]}
    live = {row["variant"]: row for row in content["memory"] if row["stage"] == 0}
    few, many = content["options"]["micro_batches"]
    table = [[said, f"{gain[variant, few]:.2f}×", f"{gain[variant, many]:.2f}×",
              f"{live[variant]['live']:g} micro-batches (1F1B: {live[variant]['live_1f1b']:g})"]
             for variant, said in (("1F1B, interleaved", "1F1B at home, two parts of the model a stage"),
                                   ("1F1B, zero bubble", "1F1B at home, weight gradients apart (ZB-H1)"),
                                   ("same phase", "same-phase ticks, attention shared"),
                                   ("same phase, ping-pong", "the same with ping-pong"),
                                   ("interleaved, ping-pong", "interleaved ticks with ping-pong"))]
    plans = {(row["placement"], row["ping_pong"]): f"{1e3 * row['plan_seconds']:.0f} ms" for row in content["planning"]}
    ticks = next(row["plans"] for row in content["planning"] if not row["ping_pong"])
    return ("Two CPU ranks as two pipeline stages, every second micro-batch one document of "
            f"{content['options']['tokens']:,} tokens, the others short ones, against 1F1B with attention at home, "
            f"{_loss(content['largest_loss_difference'])} ({_source('pipeline')}, `benchmarks/pipeline.py`):\n\n"
            + _table(("", f"tokens/s over 1F1B, {few} micro-batches", f"{many} micro-batches", "kept alive on stage 0"),
                     table)
            + f"\n\nPlanning all {ticks} ticks of a step over 64 ranks and 16 micro-batches takes "
              f"{plans['given', False]} given, {plans['balanced', False]} balanced and {plans['balanced', True]} "
              "balanced with ping-pong.")


def overlap(results: Path) -> str:
    content = _read(results, "overlap")
    return (f"Two CPU ranks over a link slowed to {content['calibration']['rate_mbit']:.0f} Mbit/s, so that what "
            f"travels just hides: one nano-batch, which waits, takes {content['single_stream_over_ping_pong']:.2f}× "
            f"the time of ping-pong, and ping-pong {content['ping_pong_over_one_byte']:.3f}× that of messages of one "
            f"byte ({_source('overlap')}, `benchmarks/overlap.py`)." + overlap_over_nccl(results))


def overlap_over_nccl(results: Path) -> str:
    if not (results / "overlap_nccl.json").exists():
        return ""
    content = _read(results, "overlap_nccl")
    chosen, traces = content["calibration"][-1], content["traces"]
    beside = {name: f"{100 * trace['overlapped_share']:.0f} %" for name, trace in traces.items()}
    table = [[row["link"], row["variant"], f"{row['step_seconds']:.2f} s", f"{100 * row['exposed_share']:.1f} %",
              beside.get(f"{row['variant']}, {row['link']}", "")] for row in content["rows"]]
    return (f"\n\nFour ranks of one {content['gpu']['name']}, shared by {content['host']['sharing']}, over NCCL by "
            f"sockets: forward and backward of {content['model']['num_layers']} layers, "
            f"{_tokens(chosen['tokens_per_rank'])} tokens of a rank in each of two nano-batches. A step's exchanges by "
            f"themselves take {100 * chosen['travel_seconds'] / chosen['compute_seconds']:.0f} % of the time of its "
            "computing. Exposed is what the bytes add to a step. The last column is the share of the time of NCCL's "
            "kernels in which other kernels run too, in a trace of one rank's streams "
            f"({_source('overlap_nccl')}, `benchmarks/overlap_nccl.py`):\n\n"
            + _table(("link", "variant", "step", "exposed", "NCCL's kernels beside others"), table))


def links(results: Path) -> str:
    """Of processes on CPUs, and of one GPU where that was measured."""
    parts = []
    for name in ("cpu", "gpu"):
        if (results / f"transports_{name}.json").exists():
            content = _read(results, f"transports_{name}")
            rate = {(row["way"], row["num_bytes"]): row["bytes_per_second"] for row in content["rows"]}
            sizes = sorted({num_bytes for _, num_bytes in rate})
            table = [[way, *(f"{rate[way, num_bytes] / 1e9:.2f}" for num_bytes in sizes)]
                     for way in dict.fromkeys(row["way"] for row in content["rows"])]
            where = content["host"].get("device", f"on CPUs, {_cores(content)}")
            parts.append(f"Two processes {where}, GB/s that each sends while it receives as much, from memory to "
                         f"memory ({_source(f'transports_{name}')}, `benchmarks/transports.py`):\n\n"
                         + _table(("way", *(f"{num_bytes >> 20} MB" for num_bytes in sizes)), table))
    return "\n\n".join(["## Links", *parts])


def adapted(results: Path) -> str:
    content = _read(results, "adapt")
    equal, learnt = content["rows"]
    return (f"{content['ranks']} CPU ranks train, the last computing all its attention twice: with `attention.adapt` "
            f"the slowest rank's attention takes {content['ratio']:.2f}× the time it takes in plans for equal "
            f"servers, where shares by speed would take {content['ratio_of_speeds']:.2f}×; the speed learnt is "
            f"{learnt['server_speed'][-1]:.2f}, {_loss(abs(equal['last_loss'] - learnt['last_loss']))} "
            f"({_source('adapt')}, `benchmarks/adapt.py`).")


def servers(results: Path) -> str:
    content = _read(results, "servers")
    table = [[f"{row['trainers']} + {row['servers']}", f"{row['tokens_per_rank']:,}",
              f"{1e3 * row['all_to_all_seconds']:.0f} ms", f"{row['ratio']:.2f}", f"{row['cpu_ratio']:.2f}",
              "" if row["crash_seconds"] is None else f"{1e3 * row['crash_seconds']:.0f} ms"]
             for row in content["rows"]]
    return ("## Servers that come and go, restarts\n\nOne attention call, forward and backward, of CPU processes on "
            f"{_cores(content)}: training ranks and dedicated servers as one group with an all-to-all, and in turn "
            "with servers over links, whose loss a run survives; ratios are medians over rounds. The last column is by "
            f"how much the longest call is longer than the median when a server is killed ({_source('servers')}, "
            "`benchmarks/servers.py`):\n\n"
            + _table(("trainers + servers", "tokens a rank", "all-to-all", "links over it", "by CPU seconds",
                      "a killed server adds"), table))


def restarts(results: Path) -> str:
    content = _read(results, "restart")
    parts = {"ended": "survivors' end", "started": "Python", "imported": "imports", "met": "group",
             "built": "model, data, plans", "loaded": "checkpoint", "stepped": "first step"}
    table = [[row["source"], f"{row['state_bytes'] / 1e6:.0f} MB",
              *(f"{row['seconds_of'][name]:.1f}" for name in parts), f"{row['seconds']:.1f}",
              f"{row['cpu_seconds']:.1f}"] for row in content["rows"]]
    return (f"A training rank of `distca train` on {content['ranks']} CPU ranks is killed by SIGKILL, on "
            f"{_cores(content)}: seconds until the end of the first step after the restart, by part, and the CPU "
            f"seconds of rank 0 in them ({_source('restart')}, `benchmarks/restart.py`):\n\n"
            + _table(("from", "state", *parts.values(), "in all", "CPU"), table))


def integrations(results: Path) -> str:
    content = _read(results, "integrations")
    options = content["options"]
    return ("## In another trainer\n\nA small Llama in Transformers on two CPU ranks, one row a document of "
            f"{_tokens(options['tokens'])}, the other as many tokens of short "
            f"ones:\n{content['speedup_over_sdpa']:.1f}× the tokens/s of the same script with its `sdpa` attention, "
            f"{content['speedup']:.2f}× of attention computed per document, "
            f"{_loss(content['largest_loss_difference'])} ({_source('integrations')}, `benchmarks/integrations.py "
            f"--tokens {options['tokens']} --layers {options['layers']}`).\n\n" + spanning(results))


def spanning(results: Path) -> str:
    content = _read(results, "spanning")
    options = content["options"]
    table = [[row["mode"], f"{row['step_seconds']:.2f}", f"{row['tokens_per_second']:,.0f}",
              f"{row['cpu_seconds']:.2f}", f"{row['work_max_over_mean']:.2f}"] for row in content["rows"]]
    ratios = "; ".join(f"{ratio:.2f}× over {mode} ({content['speedup_over_in_cpu_seconds'][mode]:.2f}× by CPU seconds)"
                       for mode, ratio in content["speedup_over"].items())
    return (f"The same model on one document of {_tokens(options['tokens'])} over two CPU ranks, on {_cores(content)}: "
            f"distca's tokens/s are {ratios}. Head and tail is the placement of torch's and Megatron's context "
            f"parallelism, here with distca's kernel and exchange ({_source('spanning')}, `benchmarks/spanning.py "
            f"--layers {options['layers']}`):\n\n"
            + _table(("attention", "seconds a step", "tokens/s", "CPU seconds of the busiest rank", "work max/mean"),
                     table) + "\n\n" + host_overhead(results))


def host_overhead(results: Path) -> str:
    content = _read(results, "host_overhead")
    spent = {row["documents"]: f"{1e3 * row['cpu_seconds']:.2f} ms" for row in content["rows"]}
    return (f"On {_cores(content)}, a layer of that model on a few tokens, forward and backward, takes "
            f"{spent['at home']} of CPU time more than with `sdpa` where documents stay at home and "
            f"{spent['over ranks']} where one lies over both ranks, kernel calls and exchanges included "
            f"({_source('host_overhead')}, `benchmarks/host_overhead.py`).")


def transformers_on_a_gpu(results: Path) -> str:
    content = _read(results, "transformers_gpu")
    seconds = {row["mode"]: f"{1e3 * row['step_seconds']:.0f} ms" for row in content["rows"]}
    return (f"A Llama of {content['options']['layers']} layers in Transformers on one {content['host']['device']}, one "
            f"packed row of {sum(content['options']['lengths']):,} tokens, a step with AdamW: {seconds['distca']} with "
            f"distca and {seconds['flex_attention']} with `flex_attention`, under torch.compile "
            f"{seconds['distca, compiled']} and {seconds['flex_attention, compiled']} ({_source('transformers_gpu')}, "
            "`benchmarks/transformers_gpu.py`).")


def stages(results: Path) -> str:
    content = _read(results, "megatron_stages")
    options, waits = content["options"], [share for pair in content["waits_of_stages"] for share in pair]
    table = [[row["mode"], f"{row['step_seconds']:.2f}", f"{row['over_home']:.2f}×",
              "measured" if row["measured"] else "replayed"] for row in content["rows"]]
    return ("Megatron-Core's own 1F1B, two stages on two CPU ranks, "
            f"{options['micro_batches']} micro-batches of {_tokens(options['tokens'])} tokens in documents of unequal "
            f"lengths: a stage waits {100 * min(waits):.0f}–{100 * max(waits):.0f} % of a step for its neighbour. What "
            "serving the neighbour's attention in these waits gains, by a thread, and ideally, where the measured "
            f"pieces are replayed and sending costs nothing ({_source('megatron_stages')}, "
            "`benchmarks/megatron_stages.py`):\n\n" + _table(("", "seconds", "over home", ""), table))


def simulated(results: Path) -> str:
    content = _read(results, "paper")
    rows = content["rows"]
    groups = [(f"{model}, {about}", [row for row in rows[figure] if row["model"] == model])
              for figure, about in (("fig9", "no pipeline"), ("fig10", "stages where they help"))
              for model in ("llama3-8b", "llama-34b")]
    table = []
    for said, group in groups:
        reached = [row["distca_of_bound"] for row in group]
        table.append([f"{said}, {len(group)} settings", *(
            f"{min(row[name] for row in group):.2f}–{max(row[name] for row in group):.2f}×"
            for name in ("disaggregated", "distca")),
            f"{100 * min(reached):.1f}–{100 * max(reached):.1f} %, above 90 % in {sum(one > 0.9 for one in reached)}"])
    return (f"## Simulated clusters\n\nDGX H200 nodes with TP 8, {content['batches']} batches a setting, over the "
            "better of variable-length packing and adaptive context parallelism on a swept grid, which hides its key "
            "gathers where that ends sooner, in its best order of a pipeline (`wlb_ideal`; [all claims](paper.md), "
            f"{_source('paper')}, `make paper`):\n\n"
            + _table(("", "disaggregated", "distca", "distca of the bound"), table) + "\n\n" + shares(results))


def shares(results: Path) -> str:
    content = _read(results, "share_of_bound")
    table = [[name, f"{one['settings']}", *(f"{100 * one[key]:.1f} %" for key in (
        "share_min", "share_median", "share_max", "ceiling_of_tasks_min"))] for name, one in content["summary"].items()]
    return ("`distca` of the bound by tensor parallelism, one batch a setting, for those settings that have run "
            f"({_source('share_of_bound')}, `benchmarks/share_of_bound.py`); the last column is what the shapes of "
            "tasks alone leave of it, with free links and perfect balance. The bound counts no recomputation: without "
            "the settings that need it, TP 1 has at least 91 %. With a pipeline at 32 nodes, exchanges between nodes "
            "are exposed.\n\n"
            + _table(("", "settings", "least", "median", "most", "least that shapes allow"), table)
            + "\n\n" + sorted_micro_batches(results))


def sorted_micro_batches(results: Path) -> str:
    content = _read(results, "micro_batch_order")
    rows = content["rows"]
    gains, ratios = ([row[name] for row in rows] for name in ("gain", "bytes_ratio"))
    stages = " and ".join(map(str, sorted({row["pp"] for row in rows})))
    return (f"Pipelines run micro-batches of like work side by side. Over {len(rows)} settings of {content['model']} "
            f"on {content['gpus']} GPUs with {stages} stages, means of {len(rows[0]['gains'])} batches, that makes a "
            f"step {min(gains):.3f}–{max(gains):.3f}× as fast as in the loader's order, and attention sends "
            f"{min(ratios):.2f}–{max(ratios):.2f}× the bytes ({_source('micro_batch_order')}, "
            "`benchmarks/micro_batch_order.py`).")


def trusted(results: Path) -> str:
    cpu, gpu = _read(results, "simulator_cpu"), _read(results, "simulator_gpu")
    charged = next(row["charged"] for row in gpu["summary"] if row["gpus"] is None and row["direction"] is None)
    return (f"How far the simulator can be trusted: {len(cpu['ratios'])} ratios of real CPU training steps on "
            f"{' and '.join(map(str, cpu['options']['ranks']))} ranks with a core each (at home, disaggregated, with "
            f"ping-pong, in a pipeline) are predicted within {100 * cpu['median_error']:.1f} % in the median and "
            f"{100 * cpu['worst_error']:.0f} % at worst, from the very step plans that ran and costs measured once "
            f"({_source('simulator_cpu')}). Ranks that share cores are not predicted so well. Attention calls of "
            f"simulated pools of 64 and 512 GPUs, {len(gpu['measured'])} batches run for real on an H200, forward and "
            f"backward: {100 * charged['median_error']:.1f} % median and {100 * charged['worst_error']:.1f} % worst "
            f"error of what is charged from the shipped tables ({_source('simulator_gpu')}, "
            "`benchmarks/simulator.py`).")


def report_page(results: Path) -> str:
    rows = _read(results, "report_page")["rows"]
    return (f"## The report page\n\nA plan and a timeline in Chromium, medians ({_source('report_page')}, "
            "`benchmarks/report_page.py`).\n\n" + _table(
                ("ranks", "spans", "MB", "written", "answers after", "all drawn after"),
                [[f"{row['ranks']:,}", f"{row['num_spans']:,}", f"{row['megabytes']:.1f}", *(
                    f"{row[name]:.2f} s" for name in ("write_seconds", "ready_seconds", "drawn_seconds"))]
                 for row in rows]))


def _read(results: Path, name: str) -> Any:
    return json.loads((results / f"{name}.json").read_text(encoding="utf-8"))


def _source(name: str) -> str:
    return f"[JSON](../../benchmarks/results/{name}.json)"


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    return "\n".join("| " + " | ".join(row) + " |" for row in (heads, ["---"] * len(heads), *rows))


def _cores(content: dict[str, Any]) -> str:
    """Other work is in the clock's seconds where more was running than there are cores."""
    cores, load = content["host"]["cores"], content["host"]["load_average"]
    return f"{cores} cores (load average {load:.1f}, the benchmark's own included)"


def _tokens(count: int) -> str:
    return f"{count // 1024}K" if count % 1024 == 0 else f"{count:,}"


def _loss(difference: float) -> str:
    return "the same loss to the last bit" if difference == 0 else f"losses that differ by {difference:.0e} at most"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Write docs/reference/measured.md from the benchmarks' JSON.")
    parser.add_argument("--check", action="store_true", help="only say whether the page is up to date")
    if not parser.parse_args().check:
        PAGE.write_text(page(), encoding="utf-8")
    elif PAGE.read_text(encoding="utf-8") != page():
        sys.exit(f"{PAGE} is not what the results say; run: python benchmarks/measured_page.py")
