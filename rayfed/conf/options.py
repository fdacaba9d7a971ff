"""Every option of a run: frozen typed groups, a docstring under each field (it becomes the ``--help`` text).

A group's ``name`` is chosen by the bare group key on the command line (``data=shapes``), the rest by dotted keys.
"""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, SerializeAsAny

Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NonNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Count = Annotated[int, Field(ge=1)]
Auto = Literal["auto"]


class Frozen(BaseModel):
    """Base of all option groups: immutable, no unknown names, field docstrings kept as descriptions."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True, validate_default=True)


class MethodOptions(Frozen):
    """Base of the options of a method; ``name`` is the method's name."""

    needs_text: ClassVar[bool] = False
    needs_proxy: ClassVar[bool] = False

    name: str
    """Which federated method runs (see --list)."""

    def problems(self) -> list[str]:
        """Contradictions inside the group, one sentence each."""
        return []

    def run_problems(self, rounds: int) -> list[str]:
        """Contradictions with the run of ``rounds`` rounds, one sentence each."""
        return []

    def ranks(self) -> dict[str, int]:
        """Ranks of adapters by option: none may be above the width of the image tower."""
        return {}

    def novel_problems(self) -> list[str]:
        """Why this configuration cannot be judged on classes it never trained on, one sentence each."""
        return []

    def uses_proxy(self) -> bool:
        """Whether this configuration needs the server's public proxy images."""
        return self.needs_proxy


class LoRAOptions(MethodOptions):
    """Options shared by methods that adapt linear layers by low-rank matrices."""

    rank: Count = 4
    """Rank of the LoRA matrices; not above the width of the narrowest adapted layer."""
    alpha: Positive = 16.0
    """LoRA alpha; the update is scaled by alpha / rank."""
    targets: Annotated[tuple[str, ...], Field(min_length=1)] = ("all",)
    """Adapted layers: all, short names (q k v out fc1 fc2 proj), module names or patterns such as *.1*.mlp.c_fc."""
    towers: Literal["vision", "text", "both"] = "vision"
    """Which tower gets adapters."""

    def ranks(self) -> dict[str, int]:
        """The LoRA rank."""
        return {"rank": self.rank}


class BottleneckOptions(MethodOptions):
    """Options shared by methods that put bottleneck adapters beside the transformer blocks of both towers."""

    blocks: Annotated[tuple[str, ...], Field(min_length=1)] = ("all",)
    """Adapted blocks of both towers: all, numbers from 1 (5, 5-12, 5-), module names or patterns such as *.1?."""
    scale: Positive = 1e-3
    """Factor kappa on what a bottleneck adds to the tokens."""
    scale_gradients: bool = True
    """Give the bottlenecks' parameters the gradient they would have with kappa = 1."""
    init: Literal["kaiming", "zero_up"] = "kaiming"
    """Start of the bottlenecks: both matrices Kaiming normal (authors), or the second zero: exactly zero-shot."""


class DataOptions(Frozen):
    """The data set and what is taken from it."""

    name: str = "shapes"
    """Data set (see --list): shapes, fashion_mnist, digits, cifar10, cifar100, folder."""
    root: str | None = None
    """Folder that holds the files."""
    shots: Count | None = None
    """Training images per class over the whole federation; none takes all there are."""
    test_shots: Count | None = None
    """Test images per class; none takes the whole test set."""
    val: Annotated[float, Field(ge=0, lt=1)] = 0.1
    """Share of the training images kept for validation when `shots` leaves none over."""
    val_shots: Count | None = None
    """Validation images per class, at most."""
    proxy: Annotated[int, Field(ge=0)] = 512
    """Public unlabelled images at the server, disjoint from all others (only for methods that distil on them)."""
    proxy_from: str | None = None
    """Data set (NAME or NAME:ROOT) the proxy images come from; none: the task's own, before clients get theirs."""
    domains: tuple[str, ...] = ()
    """Domains that are used: of `shapes` photo (the default), sketch, bright, noisy; of `folder` its own."""
    bad: Literal["stop", "skip"] = "stop"
    """Damaged picture files: stop with their list, or leave them out."""
    template: str = "a photo of a {}."
    """Prompt; {} is replaced by the class name."""
    download: bool = False
    """Let torchvision fetch the files if they are not in `root`."""
    augment: Literal["auto", "none", "crop_flip"] = "auto"
    """Training augmentation; auto: none up to 64 pixels, random resized crop and flip above."""


class TaskOptions(Frozen):
    """Which classes are trained on."""

    split: Literal["all", "base_novel"] = "all"
    """base_novel: train on the first half of the class ids alone (base); the others (novel) are only evaluated on."""


class PartitionOptions(Frozen):
    """How images are divided over clients."""

    name: Literal["dirichlet", "dir_boost", "iid", "disjoint", "domain", "domain_dirichlet", "file"] = "dirichlet"
    """Partition rule."""
    alpha: Positive = 0.1
    """Concentration of the Dirichlet rules; small is more skewed."""
    boost: NonNegative = 1.0
    """partition=dir_boost: what is added to alpha at client c mod clients.n when class c is divided."""
    min_train: Annotated[int, Field(ge=0)] = 2
    """Fewest training images a client may hold."""
    file: str | None = None
    """JSON file with the indices of every client (partition=file)."""
    max_draws: Count = 1000
    """Draws tried before a partition is refused."""
    long_tail: Positive | None = None
    """Imbalance of the training classes: largest over smallest (100), or the same as a factor (0.01); none: as is."""
    long_tail_order: tuple[str, ...] = ("label",)
    """Classes from largest to smallest: label (by number), shuffled (by the seed), or all class numbers."""
    long_tail_min: Annotated[int, Field(ge=0)] = 0
    """Fewest images a class keeps; 1 never leaves one empty."""


class BackboneOptions(Frozen):
    """The frozen model."""

    name: str = "tiny"
    """Backbone: tiny (embedded), any open_clip model name, any timm ViT name, or module:function."""
    pretrained: str = "auto"
    """Tag of published weights (`default` for timm's choice), none for random ones; auto: tiny's embedded ones."""
    checkpoint: str | None = None
    """Local file with the weights."""


class ClientOptions(Frozen):
    """The federation and the resources of its client actors."""

    n: Count = 10
    """Number of clients."""
    per_round: Count | Auto = "auto"
    """Clients drawn each round; auto: all of them."""
    gpu: NonNegative = 0.0
    """GPU share of a client actor (0.25: four share a card)."""
    cpu: NonNegative = 1.0
    """CPUs of a client actor."""
    actors: Count | Auto = "auto"
    """Client actors (processes that train clients in turn); auto: as many as fit, at most one per drawn client."""
    min_updates: Count = 1
    """A round with fewer good updates stops the run; the last good state stays saved."""
    deadline_s: Positive | None = None
    """Seconds after which a phase goes on without the clients that have not answered; none waits for all."""
    over_select: NonNegative = 0.0
    """Share of extra clients drawn; a phase ends once `per_round` have answered (0.3: 30 % more)."""


class ServerOptions(Frozen):
    """Resources of the server actor."""

    gpu: NonNegative = 0.0
    """GPU share of the server actor."""
    cpu: NonNegative = 0.0
    """CPUs reserved for the server actor; it works while clients wait."""


class TrainOptions(Frozen):
    """Local training."""

    lr: Positive = 1e-3
    """Learning rate."""
    epochs: Count = 1
    """Local epochs per round."""
    batch: Count = 32
    """Batch size."""
    optimizer: Literal["adamw", "adam", "sgd"] = "adamw"
    """Optimiser; a fresh one for every client and round."""
    momentum: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Momentum of sgd."""
    weight_decay: NonNegative = 0.0
    """Weight decay."""
    clip_norm: NonNegative = 1.0
    """Gradient norm above which gradients are scaled down; 0 never."""
    drop_last: bool = False
    """Leave out an incomplete last batch where a client has at least one full one."""


class EngineOptions(Frozen):
    """How the work is carried out; on CPU only `precision`, `threads` and `cache*` change results, in the last bits."""

    pool: Literal["ray", "local"] = "ray"
    """Client actors on Ray, or everything in this process."""
    address: str | None = None
    """Ray cluster to join: host:port, or auto for one on this machine; none: RAY_ADDRESS, else a private one."""
    device: Literal["auto", "cpu"] = "auto"
    """auto: the card a share was given of; cpu: compute on the CPU all the same, to rehearse a plan for GPUs."""
    precision: Literal["auto", "fp32", "bf16"] = "auto"
    """Arithmetic of the frozen model; trainable parameters are float32. auto: bf16 on GPU, fp32 on CPU."""
    threads: Count = 1
    """Compute threads of an actor (results may differ in the last bits between thread counts)."""
    retries: Annotated[int, Field(ge=0)] = 2
    """How often a client's job is tried again after its actor died."""
    cache: Literal["off", "fp32", "fp16"] = "fp32"
    """Keep activations before the first adapted block (methods that adapt late blocks); fp16 moves features by 1e-3."""
    cache_mb: Count = 1024
    """Memory for them per actor; a client's images that alone need more are not kept."""
    cache_dir: str | None = None
    """Folder on a local disk for what exceeds `cache_mb`; none: it is computed again each time."""


class EvalOptions(Frozen):
    """Evaluation."""

    every: Annotated[int, Field(ge=0)] = 1
    """Evaluate every so many rounds, and after the last one; 0: only after the last one."""
    batch: Count = 128
    """Images per forward pass."""


class CheckpointOptions(Frozen):
    """Saved states."""

    every: Count = 1
    """Save every so many rounds, and after the last one."""
    keep: Annotated[int, Field(ge=1)] = 2
    """How many saved rounds are kept."""


class TrackingOptions(Frozen):
    """MLflow."""

    enabled: bool = True
    """Log to MLflow."""
    uri: str | None = None
    """Tracking store: sqlite:///file.db or http://host:port; none: mlflow.db in the folder of the run."""
    experiment: str = "rayfed"
    """Experiment name."""
    run_name: str | None = None
    """Run name; none: method, data and seed."""
    model: Literal["none", "global", "personal"] = "none"
    """Log the adapted model as an MLflow pyfunc; personal: with clients' private adapters, which then leave `out`."""
    register_as: str | None = None
    """Name under which the logged model is registered."""


class RunOptions(Frozen):
    """One run."""

    method: SerializeAsAny[MethodOptions]
    profile: Literal["auto", "embedded", "paper", "authors"] = "auto"
    """Preset of train.*, rounds, clients.*, method.* (a paper's, data too); auto: embedded with tiny, else paper."""
    data: DataOptions = DataOptions()
    task: TaskOptions = TaskOptions()
    partition: PartitionOptions = PartitionOptions()
    backbone: BackboneOptions = BackboneOptions()
    clients: ClientOptions = ClientOptions()
    server: ServerOptions = ServerOptions()
    train: TrainOptions = TrainOptions()
    rounds: Count = 10
    """Rounds in all."""
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    """Seed of every random stream."""
    eval: EvalOptions = EvalOptions()
    engine: EngineOptions = EngineOptions()
    checkpoint: CheckpointOptions = CheckpointOptions()
    tracking: TrackingOptions = TrackingOptions()
    out: str | None = None
    """Folder of the results; none: outputs/<method>-<data>-s<seed>-<time>."""
    resume: Literal["never", "auto"] = "never"
    """auto: go on from the newest whole checkpoint in `out`."""

    @property
    def cohort_size(self) -> int:
        """Clients drawn each round."""
        return self.clients.n if self.clients.per_round == "auto" else self.clients.per_round


GROUPS = ("method", "data", "partition", "backbone")
"""Option groups that have a ``name``, chosen by the bare key."""

RESUMABLE = frozenset(
    {
        "out",
        "resume",
        "rounds",
        "profile",
        "engine.pool",
        "engine.address",
        "engine.device",
        "engine.retries",
        "clients.actors",
        "clients.cpu",
        "clients.gpu",
        "clients.min_updates",
        "clients.deadline_s",
        "server.cpu",
        "server.gpu",
        "eval.every",
        "checkpoint.every",
        "checkpoint.keep",
        "tracking.enabled",
        "tracking.uri",
        "tracking.experiment",
        "tracking.run_name",
        "tracking.model",
        "tracking.register_as",
    }
)
"""Options a resumed run may change: none of them changes a bit of what is computed, except ``rounds``.

(``deadline_s`` decides who answers in time, which no two runs share anyway.)
"""
