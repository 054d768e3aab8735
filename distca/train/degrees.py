"""Check that tensor- and pipeline-parallel degrees divide the model and the ranks, in the words of the settings.

Asked before any process starts: of a named shape by the settings, of a model to load by the machine that holds it.
"""


def check_tensor(tensor: int, model: str, num_heads: int, num_kv_heads: int, ffn: int) -> None:
    """Refuse a tensor-parallel size that cannot share a layer out evenly."""
    for kind, number in (("heads", num_heads), ("KV heads", num_kv_heads), ("feed-forward columns", ffn)):
        if number % tensor:
            raise ValueError(f"parallel.tensor is {tensor} but model {model!r} has {number} {kind}; choose a size that "
                             "divides them")


def check_pipeline(stages: int, model: str, num_layers: int, tied: bool) -> None:
    """Refuse more stages than layers, and stages that would have to share the embedding."""
    if stages > num_layers:
        raise ValueError(f"parallel.pipeline is {stages} but model {model!r} has {num_layers} layers; give every stage "
                         "at least one")
    if stages > 1 and tied:
        raise ValueError(f"parallel.pipeline is {stages} but the output layer of model {model!r} is its embedding "
                         "(model.tied), which another stage holds; untie them (model.untied), or use one stage")


def check_adapt(adapt: bool, mode: str, dedicated: int) -> None:
    """Refuse to learn speeds where no plan could use them, or where not all servers measure."""
    if adapt and mode != "disaggregated":
        raise ValueError(f"attention.adapt is true but attention.mode is {mode!r}, in which speeds change nothing; use "
                         "'disaggregated', or set attention.adapt to false")
    if adapt and dedicated:
        raise ValueError(f"attention.adapt is true but attention.dedicated is {dedicated}, and ranks that only serve "
                         "measure nothing; set attention.adapt to false, or attention.dedicated to 0")


def check_dedicated(dedicated: int, ranks: int, tensor: int, mode: str, state: str) -> None:
    """Refuse ranks that only serve where nobody would be left to train, or nobody would ask them."""
    if not dedicated:
        return
    if dedicated >= ranks:
        raise ValueError(f"attention.dedicated is {dedicated} but there are {ranks} ranks (run.ranks); leave at least "
                         "one to train")
    if dedicated % tensor:
        raise ValueError(f"attention.dedicated is {dedicated} but heads are shared by {tensor} ranks "
                         f"(parallel.tensor), each with servers of its own; give a multiple of {tensor}")
    if mode != "disaggregated":
        raise ValueError(f"attention.dedicated is {dedicated} but attention.mode is {mode!r}, in which the data ranks "
                         "keep attention to themselves; use 'disaggregated', or set attention.dedicated to 0")
    if state != "resend":
        raise ValueError(f"attention.dedicated is {dedicated} but attention.state is {state!r} and dedicated servers "
                         "keep nothing; use 'resend'")
