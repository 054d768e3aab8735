"""Shapes of models and clusters, from which every cost is derived.

All byte counts are per token, per layer and per tensor-parallel rank. Tensor parallelism shards the heads. With more
ranks than KV heads, KV heads are replicated: each rank has one, and KV bytes per rank stop shrinking.
"""

import difflib
from collections.abc import Iterable
from dataclasses import dataclass, fields

from distca.validation import UserError, check_number, check_whole, short

MAX_SIZE = 2**31  # for dimensions of models and GPUs per node; some products of them must fit an int64
MAX_RATE = 1e30   # for sizes, rates and latencies of clusters
MOST_NAMED = 20   # names that an error lists
BF16_BYTES = 2
FLOAT32_BYTES = 4


def unknown_name(kind: str, name: object, known: Iterable[str]) -> UserError:
    """Return the error for a name that is not among the known names; it suggests the most similar one."""
    names, text = list(known), str(name).lower()[:100]
    near = difflib.get_close_matches(text, names, n=1, cutoff=0.4)
    hint = f"did you mean {near[0]!r}? " if near else ""
    if len(names) > MOST_NAMED:
        shown = difflib.get_close_matches(text, names, n=MOST_NAMED // 2, cutoff=0.0)
        names = [*shown, f"{len(names) - len(shown)} more"]
    return UserError(f"{kind} {short(name)} is unknown; {hint}choose one of: {', '.join(names)}")


@dataclass(frozen=True, slots=True)
class Experts:
    """Mixture of experts: every token is routed to a few of many feed-forwards."""

    num: int
    per_token: int
    ffn: int               # feed-forward size of one expert
    shared_ffn: int = 0    # total feed-forward size of the shared experts, which every token uses
    dense_layers: int = 0  # layers that have the model's dense feed-forward instead of experts


@dataclass(frozen=True, slots=True)
class Latent:
    """Multi-head latent attention: queries, keys and values are projected from a low-rank latent of each token."""

    kv_rank: int
    rope_dim: int     # part of head_dim with RoPE; all heads share this part of a key
    q_rank: int = 0   # 0: queries are projected from the hidden state directly


@dataclass(frozen=True, slots=True)
class ModelShape:
    """A decoder with grouped-query or latent attention and SwiGLU feed-forwards, dense or mixture-of-experts."""

    name: str
    num_layers: int
    hidden: int
    num_heads: int
    num_kv_heads: int
    head_dim: int         # of queries and keys
    ffn: int
    vocab: int
    value_dim: int = 0    # of a head's values; 0: head_dim
    experts: Experts | None = None
    latent: Latent | None = None
    windows: tuple[int | None, ...] = ()  # [layers] keys that a query attends to, its own included; empty: no windows

    def __post_init__(self) -> None:
        if self.value_dim == 0:
            object.__setattr__(self, "value_dim", self.head_dim)
        for field, value in self._numbers():
            check_whole(f"model {self.name!r}: {field}", value, most=MAX_SIZE)
        if self.windows and len(self.windows) != self.num_layers:
            raise UserError(f"model {self.name!r}: windows are of {len(self.windows)} layers but there are "
                            f"{self.num_layers}; give one for each, or none")
        if self.num_heads % self.num_kv_heads:
            raise UserError(f"model {self.name!r}: num_heads is {self.num_heads}, not a multiple of num_kv_heads "
                            f"{self.num_kv_heads}; every KV head serves the same number of query heads")
        if self.experts is not None and self.experts.per_token > self.experts.num:
            raise UserError(f"model {self.name!r}: experts.per_token is {self.experts.per_token} but there are "
                            f"{self.experts.num}; give at most as many")
        if self.experts is not None and not 0 <= self.experts.dense_layers < self.num_layers:
            raise UserError(f"model {self.name!r}: experts.dense_layers is {self.experts.dense_layers} of "
                            f"{self.num_layers} layers; give fewer than there are")
        if self.latent is not None and self.latent.rope_dim >= self.head_dim:
            raise UserError(f"model {self.name!r}: latent.rope_dim is {self.latent.rope_dim} of a head_dim of "
                            f"{self.head_dim}; give less")

    def _numbers(self) -> Iterable[tuple[str, object]]:
        """Yield the name and value of every field that must be a positive whole number."""
        for field in fields(self):
            if field.name not in ("name", "experts", "latent", "windows"):
                yield field.name, getattr(self, field.name)
        yield from (("windows", window) for window in dict.fromkeys(self.windows) if window is not None)
        for name, part, may_be_zero in (("experts", self.experts, ("shared_ffn", "dense_layers")),
                                        ("latent", self.latent, ("q_rank",))):
            for one in fields(part) if part is not None else ():
                value = getattr(part, one.name)
                if value != 0 or one.name not in may_be_zero:
                    yield f"{name}.{one.name}", value

    @property
    def expert_share(self) -> float:
        """Return the share of the layers that have experts."""
        return 0.0 if self.experts is None else 1 - self.experts.dense_layers / self.num_layers

    @property
    def layer_windows(self) -> tuple[int | None, ...]:
        """The window of every layer, None for full attention."""
        return self.windows or (None,) * self.num_layers

    def heads_per_rank(self, tp: int = 1) -> int:
        """Return the query heads on one tensor-parallel rank."""
        if isinstance(tp, bool) or not isinstance(tp, int) or tp < 1 or self.num_heads % tp:
            raise UserError(
                f"tp is {short(tp)} but model {self.name!r} has {self.num_heads} heads; choose a tp that divides them")
        return self.num_heads // tp

    def kv_heads_per_rank(self, tp: int = 1) -> int:
        """Return the KV heads on one tensor-parallel rank, replicated if there are more ranks than KV heads."""
        self.heads_per_rank(tp)
        if max(tp, self.num_kv_heads) % min(tp, self.num_kv_heads):
            raise UserError(
                f"tp is {tp} but model {self.name!r} has {self.num_kv_heads} KV heads; choose a tp that divides them "
                "or is a multiple of them")
        return max(1, self.num_kv_heads // tp)

    def q_token_bytes(self, tp: int = 1, element_bytes: int = BF16_BYTES) -> int:
        return self.heads_per_rank(tp) * self.head_dim * element_bytes

    def kv_token_bytes(self, tp: int = 1, element_bytes: int = BF16_BYTES) -> int:
        """Return the bytes of one token's key and value together."""
        return self.kv_heads_per_rank(tp) * (self.head_dim + self.value_dim) * element_bytes

    def out_token_bytes(self, tp: int = 1, element_bytes: int = BF16_BYTES) -> int:
        return self.heads_per_rank(tp) * self.value_dim * element_bytes

    def lse_token_bytes(self, tp: int = 1) -> int:
        """Return the bytes of one token's log-sum-exp: a float32 for every query head."""
        return self.heads_per_rank(tp) * FLOAT32_BYTES


@dataclass(frozen=True, slots=True)
class ClusterShape:
    """Nodes of equal GPUs: the rates that kernels reach, and the bandwidth of one GPU per direction."""

    name: str
    gpu: str
    gpus_per_node: int
    peak_flops_per_second: float       # dense bf16, from the data sheet
    gemm_flops_per_second: float       # achieved by bf16 matrix products
    attention_flops_per_second: float  # achieved by causal attention, forward
    memory_bytes: float
    memory_bandwidth: float
    intra_node_bandwidth: float  # bytes/s one way over NVLink
    inter_node_bandwidth: float  # bytes/s one way over the GPU's own NIC
    intra_node_latency_seconds: float
    inter_node_latency_seconds: float
    nodes_per_pod: int = 0       # plans avoid traffic between pods first; 0: one pod
    inter_pod_bandwidth: float = 0.0  # bytes/s one way per GPU between pods; 0: as between nodes
    host_bandwidth: float = 50e9  # bytes/s one way between a GPU and host memory; PCIe 5.0 reaches about 50 GB/s

    def ranks_per_node(self, tp: int = 1) -> int:
        """Return the number of tensor-parallel groups on a node."""
        return max(self.gpus_per_node // tp, 1)

    def __post_init__(self) -> None:
        check_whole(f"cluster {self.name!r}: gpus_per_node", self.gpus_per_node, most=MAX_SIZE)
        check_whole(f"cluster {self.name!r}: nodes_per_pod", self.nodes_per_pod, least=0, most=MAX_SIZE)
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name in ("name", "gpu", "gpus_per_node", "nodes_per_pod"):
                continue
            may_be_zero = field.name.endswith("latency_seconds") or field.name == "inter_pod_bandwidth"
            bound = {"least": 0.0} if may_be_zero else {"above": 0.0}
            check_number(f"cluster {self.name!r}: {field.name}", value, most=MAX_RATE, **bound)


# The H200's GEMM and attention rates are measured. The H100 has the same die and gets the same rates; the others
# are assumed to reach the same fraction of their peak. Peaks, memory and links are the vendor's published figures.
# Latencies are typical of NVLink and of RDMA writes between nodes, not measured.
CLUSTERS = {
    cluster.name: cluster
    for cluster in (
        ClusterShape("dgx-h200", "H200", 8, 989e12, 754e12, 550e12, 141e9, 4.8e12, 450e9, 50e9, 2e-6, 6e-6),
        ClusterShape("dgx-h100", "H100", 8, 989e12, 754e12, 550e12, 80e9, 3.35e12, 450e9, 50e9, 2e-6, 6e-6),
        ClusterShape("dgx-a100", "A100", 8, 312e12, 238e12, 174e12, 80e9, 2.04e12, 300e9, 25e9, 2e-6, 6e-6,
                     host_bandwidth=25e9),
        ClusterShape("dgx-b200", "B200", 8, 2250e12, 1715e12, 1251e12, 180e9, 8e12, 900e9, 50e9, 2e-6, 6e-6),
        ClusterShape("gb200-nvl72", "GB200", 72, 2500e12, 1906e12, 1390e12, 186e9, 8e12, 900e9, 50e9, 2e-6, 6e-6,
                     host_bandwidth=200e9),
    )
}


def cluster_named(name: str) -> ClusterShape:
    """Return a known cluster, such as `dgx-h200`."""
    if name not in CLUSTERS:
        raise unknown_name("cluster", name, CLUSTERS)
    return CLUSTERS[name]
