"""Options of FedDTL, with the profile of the paper's summary."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from rayfed.conf.options import Auto, Count, LoRAOptions, NonNegative, Positive

Share = Annotated[float, Field(ge=0, le=1)]


class Options(LoRAOptions):
    """Image LoRA at the clients, text LoRA at the server; supervised rounds, then rounds of policy optimisation."""

    needs_text: ClassVar[bool] = True

    name: Literal["feddtl"] = "feddtl"
    alpha: Positive = 4.0
    """LoRA alpha; the update is scaled by alpha / rank."""
    targets: Annotated[tuple[str, ...], Field(min_length=1)] = ("q", "k", "v")
    """Adapted layers of the adapted blocks, by the same names as of other methods; the paper does not say which."""
    vision_blocks: Count = 2
    """The last so many blocks of the image tower are adapted."""
    text_blocks: Count = 2
    """The last so many blocks of the text tower are adapted."""
    decouple: bool = True
    """Train the text LoRA at the server, on uploaded embeddings; no: at the clients, averaged like the image LoRA."""
    two_stage: bool = True
    """Policy optimisation after the supervised rounds; no: supervised rounds only."""
    sft_rounds: Count | Auto = "auto"
    """Supervised rounds M before policy optimisation; auto: half of `rounds`, at least one."""
    rl_epochs: Count = 3
    """Local epochs of a round of policy optimisation (of a supervised one: train.epochs)."""
    rl_lr: Positive | None = None
    """Learning rate of policy optimisation; none: train.lr."""
    rl_clip_norm: NonNegative = 1.0
    """Gradient norm above which gradients of policy optimisation are scaled down; 0 never."""
    group: Annotated[int, Field(ge=2)] = 3
    """Draws G for each image."""
    sigma: NonNegative = 0.1
    """Standard deviation of the latent noise that makes the draws of a group differ."""
    sigma_relative: bool = False
    """Measure sigma in units of the root mean square of what the noise is added to, image by image."""
    noise_at: Literal["embed_pre_norm", "embed_post_norm", "block_input"] = "embed_pre_norm"
    """Noise on the image embedding before or after its normalisation, or on the input of the first adapted block."""
    action: Literal["argmax", "categorical"] = "argmax"
    """The class drawn: the likeliest given the noise, or one drawn from the noisy probabilities."""
    clip: Positive = 0.2
    """Probability ratios count between 1 - clip and 1 + clip."""
    beta: NonNegative = 0.5
    """Weight of the KL to the reference policy."""
    kl_estimator: Literal["k3", "k3_is", "exact"] = "k3"
    """KL from the drawn classes (k3), the same weighted by the probability ratio, or summed over all classes."""
    ref_mix: Share = 0.5
    """Share of the adapter after the last supervised round in the reference; the rest is the round's global adapter."""
    old_policy: Literal["epoch", "step", "round"] = "epoch"
    """When the policy that draws is renewed; with step no ratio differs from 1, so that clipping never acts."""
    adv_eps: Positive = 1e-4
    """Added to a group's standard deviation in its advantages."""
    upload: Literal["subset", "samples", "prototypes"] = "subset"
    """Embeddings sent: of up to `per_class` images of a class, drawn anew each round; of all images; or class means."""
    per_class: Count = 16
    """upload=subset: images of a class at most."""
    min_count: Count = 3
    """upload=prototypes: classes with fewer images are withheld."""
    upload_noise: NonNegative = 0.0
    """Standard deviation of Gaussian noise on every uploaded embedding of unit length (made unit length again)."""
    text_lr: Positive = 1e-3
    """Learning rate of the server's Adam on the text LoRA."""
    text_epochs: Count = 2
    """Passes over the uploaded embeddings per round."""
    text_batch: Count = 64
    """Batch size at the server."""
    agg: Literal["factor", "delta"] = "factor"
    """Average the factors A and B, or the products B A (cut back to the rank by a singular value decomposition)."""

    def problems(self) -> list[str]:
        """Contradictions inside the group."""
        found = []
        if self.towers != "vision":
            found.append(
                f"method.towers={self.towers}: FedDTL adapts both towers, the text tower by method.decouple; "
                "leave method.towers at vision."
            )
        if self.two_stage and self.sigma == 0 and self.action == "argmax":
            found.append(
                "method.sigma=0 with method.action=argmax makes all draws of a group equal, so nothing is learned: set "
                "method.sigma above 0 or method.action=categorical."
            )
        if not self.decouple and (self.upload_noise > 0 or self.upload != "subset"):
            found.append(
                "method.decouple=false uploads no embeddings, so method.upload and method.upload_noise do nothing: "
                "leave them out."
            )
        return found

    def sft_of(self, rounds: int) -> int:
        """How many of ``rounds`` are supervised."""
        if not self.two_stage:
            return rounds
        return max(rounds // 2, 1) if self.sft_rounds == "auto" else self.sft_rounds

    def run_problems(self, rounds: int) -> list[str]:
        """Contradictions with the run."""
        if not self.two_stage or self.sft_rounds == "auto" or self.sft_rounds < rounds:
            return []
        return [
            f"method.sft_rounds={self.sft_rounds} leaves none of rounds={rounds} to policy optimisation: lower it, "
            "raise rounds, or set method.two_stage=false."
        ]


PROFILES: dict[str, dict[str, Any]] = {
    "embedded": {
        # Both rates by accuracy on validation images (seed 100, `python -m benchmarks.studies lr`): of 1e-4 to 3e-3
        # with text rates of 3e-5 to 3e-3 this pair was best, its neighbours within 0.1 points, text rates above 1e-4
        # worse.
        "train.optimizer": "adam",
        "train.lr": 1e-3,
        "method.text_lr": 3e-5,
        "train.epochs": 2,
        "train.clip_norm": 0.0,
        "rounds": 8,
        "clients.n": 10,
        "method.text_blocks": 1,
        # As long beside tiny's embeddings (64 numbers, length 14) as 0.1 beside ViT-B/16's (512 numbers, length 10).
        "method.sigma": 0.4,
    },
    "paper": {
        "train.optimizer": "adam",
        "train.lr": 1e-3,
        "train.epochs": 2,
        "train.batch": 64,
        "train.clip_norm": 0.0,
        "rounds": 20,
        "clients.n": 5,
        "task.split": "base_novel",
        "data.shots": 16,
    },
}
