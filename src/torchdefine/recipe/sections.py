"""The sections of a recipe: what each of them decides, and the bounds of every value."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from torchdefine.embedding.plan import GroupScheme, Rounding, Skip
from torchdefine.embedding.unit import VARIANTS, Norm
from torchdefine.errors import UserError
from torchdefine.ops.group_stack import ACTIVATIONS
from torchdefine.recipe.settings import setting
from torchdefine.spelling import did_you_mean


def require(holds: bool, sentence: str) -> None:
    if not holds:
        raise UserError(sentence)


@dataclass(frozen=True)
class DataSettings:
    corpus: str = setting("wikitext-2-shuffled", "A named corpus, or a folder with train, valid and test text.")
    min_count: int = setting(1, "Words seen less often than this in the training text become <unk>.")
    max_size: int | None = setting(None, "At most this many words in the vocabulary, the most frequent ones.")
    tokenizer: str | None = setting(None, "A tokenizers file (BPE) to use instead of words.")
    vocabulary_size: int | None = setting(
        None, "Size of the published vocabulary, for `params` to count with; training goes by its own text."
    )

    def __post_init__(self) -> None:
        require(self.min_count >= 1, f"data.min_count is {self.min_count}, but must be at least 1.")


@dataclass(frozen=True)
class EmbeddingSettings:
    kind: str = setting("tokens", "tokens, or the name of a registered embedding.")
    map: Literal["standard", "projective", "adaptive"] = setting("standard", "The table that ids are mapped with.")
    map_dim: int = setting(128, "Width of the table, the paper's n.")
    projected_dim: int | None = setting(None, "Width of a projective map's vectors; embedding_dim by default.")
    cutoffs: tuple[int, ...] = setting(
        (20_000, 40_000, 200_000), "Ranks by frequency at which the second and later bands of an adaptive map start."
    )
    division: int = setting(4, "How many times narrower each band is than the one before.")
    scaled: bool = setting(False, "Multiply the map's vectors by the square root of map_dim.")
    scale: float | None = setting(None, "Multiply the map's vectors by this number instead.")
    init_std: float | None = setting(None, "Spread of the fresh table; 1 / sqrt(map_dim) by default.")
    projection_std: float | None = setting(
        None, "Spread of a projective map's fresh projection; 1 / sqrt(map_dim) by default."
    )
    row_dropout: float = setting(0.0, "Share of token types whose vectors are zeroed in a step.")
    unit: str = setting("none", f"none, projection, mlp, or a variant of the DeFINE unit: {', '.join(VARIANTS)}.")
    embedding_dim: int | None = setting(None, "Width of the finished vectors, the paper's m; map_dim by default.")
    expand_dim: int = setting(1024, "Widest layer of the unit, the paper's k; the hidden width of mlp.")
    depth: int = setting(3, "Layers of the unit, the paper's N, the reduce layer included.")
    max_groups: int | None = setting(
        None, "Most groups of a layer, the paper's g_max; 2^(depth - 1) by default, at most 16."
    )
    groups: GroupScheme | None = setting(None, "Another rule for the groups than the variant's own.")
    skip: Skip | None = setting(None, "Another way to see the input again than the variant's own.")
    reach_expand_dim: bool = setting(True, "Whether the last expansion layer is expand_dim wide.")
    rounding: Rounding = setting("nearest", "How widths between map_dim and expand_dim are rounded.")
    multiple_of: int | None = setting(None, "Round widths to a multiple of this; of the most groups by default.")
    fixed_width: int | None = setting(
        None, "One width for all expansion layers; by default they grow, or have expand_dim / 2 with skip residual."
    )
    norm: Norm = setting("none", "Norm of the expansion layers.")
    activation: str = setting("gelu", f"Activation of the expansion layers: {', '.join(ACTIVATIONS)}.")
    dropout: float = setting(0.0, "Dropout after every expansion layer.")
    equalised: bool = setting(
        False, "Whether the unit's weights are divided by the root of their fan-in in use, and so learn more slowly."
    )
    options: dict[str, Any] = setting({}, "Settings of a registered embedding.")

    def __post_init__(self) -> None:
        for name in ("scale", "init_std", "projection_std"):
            value = getattr(self, name)
            require(value is None or value > 0, f"embedding.{name} is {value}, but must be above 0.")
        require(
            0 <= self.row_dropout < 1, f"embedding.row_dropout is {self.row_dropout}, but must be from 0 to below 1."
        )
        known = ("none", "projection", "mlp", *VARIANTS)
        require(self.unit in known, f"embedding.unit {self.unit!r} is unknown{did_you_mean(self.unit, known)}")


@dataclass(frozen=True)
class ContextSettings:
    kind: str = setting("lstm", "lstm, transformer-xl, or the name of a registered context model.")
    layers: int = setting(1, "How many layers.")
    hidden_dim: int = setting(
        256, "Width of all layers of an LSTM but the last (see output_dim); a transformer's is that of the embedding."
    )
    output_dim: int | None = setting(
        None, "Width of the last or only layer of an LSTM; map_dim if the output is tied, else hidden_dim."
    )
    heads: int = setting(8, "Attention heads of a transformer.")
    head_dim: int | None = setting(None, "Width of a head; the embedding's divided by heads by default.")
    inner_dim: int | None = setting(
        None, "Width inside a transformer's dense layers; by default four times the embedding's."
    )
    pre_norm: bool = setting(False, "Whether a transformer's norms come before its parts; otherwise after them.")
    memory: int = setting(150, "Positions of earlier segments that a transformer remembers.")
    same_length: bool = setting(False, "Whether all positions see equally many others: as many as memory says.")
    clamp: int | None = setting(None, "Distances beyond this one count as this one.")
    eval_memory: int | None = setting(None, "The memory in evaluation; the same as in training by default.")
    eval_same_length: bool = setting(False, "The same_length of evaluation.")
    eval_clamp: int | None = setting(None, "The clamp of evaluation.")
    input_dropout: float = setting(0.0, "Dropout on the inputs of the first layer.")
    hidden_dropout: float = setting(0.0, "Dropout between the layers.")
    output_dropout: float = setting(0.0, "Dropout on the outputs of the last layer.")
    recurrent_dropout: float = setting(0.0, "Dropout on the recurrent weights of every layer of an LSTM.")
    state_dropout: float = setting(0.0, "Share of streams whose LSTM state is reset in a training step.")
    activation_penalty: float = setting(0.0, "Weight of the mean square of the vectors that the output layer sees.")
    temporal_penalty: float = setting(0.0, "Weight of the mean square of their change from position to position.")
    attention_dropout: float = setting(0.0, "Dropout on the attention weights of a transformer.")
    options: dict[str, Any] = setting({}, "Settings of a registered context model.")

    def __post_init__(self) -> None:
        for name in ("layers", "hidden_dim", "output_dim", "heads", "head_dim", "inner_dim", "memory", "eval_memory"):
            value = getattr(self, name)
            require(value is None or value >= 1, f"context.{name} is {value}, but must be at least 1.")


@dataclass(frozen=True)
class OutputSettings:
    kind: str = setting("full", "full, adaptive, mixture, or the name of a registered output layer.")
    tied: bool = setting(True, "Whether it shares the tables of the map.")
    bias: bool = setting(True, "Whether a full softmax has a bias for every word.")
    cutoffs: tuple[int, ...] = setting(
        (20_000, 40_000, 200_000), "Where the bands of an adaptive softmax over a standard or projective table start."
    )
    tied_projections: tuple[bool, ...] = setting(
        (), "For each of these bands, whether it takes the projection of a projective map; none does by default."
    )
    label_smoothing: float = setting(0.0, "Share of probability spread over all words in the training loss.")
    components: int = setting(15, "Softmaxes that a mixture mixes.")
    latent_dropout: float = setting(0.0, "Dropout on the vectors of a mixture's components.")
    options: dict[str, Any] = setting({}, "Settings of a registered output layer.")

    def __post_init__(self) -> None:
        require(
            0 <= self.label_smoothing < 1,
            f"output.label_smoothing is {self.label_smoothing}, but must be at least 0 and below 1.",
        )
        given, bands = len(self.tied_projections), len(self.cutoffs) + 1
        require(
            given in (0, bands),
            f"output.tied_projections has {given} values for the {bands} bands of output.cutoffs: give one for each.",
        )


@dataclass(frozen=True)
class OptimSettings:
    optimizer: Literal["sgd", "adam", "adamw"] = setting("sgd", "The optimiser.")
    lr: float = setting(20.0, "Learning rate.")
    momentum: float = setting(0.0, "Momentum of SGD.")
    beta1: float = setting(0.9, "Adam's β₁.")
    beta2: float = setting(0.999, "Adam's β₂.")
    weight_decay: float = setting(0.0, "Weight decay.")
    clip: float | None = setting(0.25, "Largest norm of the gradient; none for no clipping.")
    averaging: Literal["none", "stalled", "always"] = setting(
        "none", "When to begin averaging the weights of all steps; from then on the average is validated and kept."
    )
    stall_patience: int = setting(5, "Stalled means: worse than the best validation before the last N.")

    def __post_init__(self) -> None:
        require(self.lr > 0, f"optim.lr is {self.lr}, but must be above 0.")
        require(self.clip is None or self.clip > 0, f"optim.clip is {self.clip}, but must be above 0, or none.")
        for name in ("momentum", "beta1", "beta2"):
            require(0 <= getattr(self, name) < 1, f"optim.{name} is {getattr(self, name)}, but must be in [0, 1).")
        require(self.stall_patience >= 0, f"optim.stall_patience is {self.stall_patience}, but must not be negative.")
        require(self.weight_decay >= 0, f"optim.weight_decay is {self.weight_decay}, but must not be negative.")


@dataclass(frozen=True)
class ScheduleSettings:
    kind: Literal["constant", "drops", "cosine", "linear", "plateau", "noam"] = setting(
        "constant", "How the learning rate moves after the warm-up."
    )
    warmup: int = setting(0, "Steps over which the rate rises from 0.")
    noam_width: int = setting(512, "noam divides the rate by the square roots of this width and of the step.")
    drops: tuple[float, ...] = setting((), "When the rate is divided by factor: epochs, or steps with train.steps.")
    factor: float = setting(10.0, "What drops and plateau divide the rate by.")
    patience: int = setting(0, "Validations without a better loss before plateau divides.")
    decay_from: float = setting(0.0, "Share of the run after which cosine and linear start to fall.")
    final_ratio: float = setting(0.0, "Rate at the end of cosine and linear, as a share of lr.")

    def __post_init__(self) -> None:
        require(self.factor > 1, f"schedule.factor is {self.factor}, but must be above 1.")
        for name in ("warmup", "patience", "final_ratio"):
            value = getattr(self, name)
            require(value >= 0, f"schedule.{name} is {value}, but must not be negative.")
        require(self.noam_width >= 1, f"schedule.noam_width is {self.noam_width}, but must be at least 1.")
        noam_without_warmup = self.kind == "noam" and not self.warmup
        require(not noam_without_warmup, "The schedule noam needs a schedule.warmup: use 8000, say.")
        require(
            self.kind != "drops" or bool(self.drops),
            "The schedule drops needs schedule.drops, which say when: use 15, say, or schedule.kind constant.",
        )
        ordered = list(self.drops) == sorted(set(self.drops)) and all(drop > 0 for drop in self.drops)
        require(ordered, f"schedule.drops {self.drops} are not positive and increasing.")
        require(0 <= self.decay_from < 1, f"schedule.decay_from is {self.decay_from}, but must be in [0, 1).")


@dataclass(frozen=True)
class TrainSettings:
    batch_size: int = setting(32, "Streams of text read side by side, over all processes.")
    length: int = setting(70, "Tokens of each stream in a step (truncated back-propagation).")
    random_length: bool = setting(
        False, "Vary segment lengths around train.length, differently every epoch, and scale the rate with them."
    )
    epochs: float | None = setting(None, "Passes over the training text.")
    steps: int | None = setting(None, "Steps, instead of epochs.")
    accumulate: int = setting(
        1, "Parts that a batch is processed in, to save memory; for a translator, batches in a step."
    )
    precision: Literal["fp32", "tf32", "bf16", "fp16"] = setting(
        "fp32", "Arithmetic of the matrix products on a GPU; a CPU computes in fp32."
    )
    compile: bool = setting(False, "Run the embedding and a Transformer-XL's layers through torch.compile.")
    record: bool = setting(True, "With one process on a GPU, record each kind of step as a CUDA graph and replay it.")
    start_from: str | None = setting(None, "A run whose best weights this one starts from, as fine-tuning does.")
    stop_when_stalled: bool = setting(False, "End the run when validation has stalled, by optim.stall_patience.")
    seed: int = setting(1, "Decides initial weights, dropout, random lengths and the order of sentence pairs.")
    eval_every: int = setting(0, "Steps between validations; 0 for once an epoch, or for five in a run of fewer steps.")
    log_every: int = setting(50, "Steps between lines of the log.")
    checkpoint_every: int = setting(
        500, "Steps between checkpoints to go on from; the best weights are kept at every validation."
    )
    keep: int = setting(0, "How many of the latest validations' weights stay, for `average`.")

    def __post_init__(self) -> None:
        for name in ("batch_size", "length", "accumulate", "log_every", "checkpoint_every"):
            require(getattr(self, name) >= 1, f"train.{name} is {getattr(self, name)}, but must be at least 1.")
        require(0 <= self.seed < 2**62, f"train.seed is {self.seed}, but must be from 0 to below 2^62.")
        require(self.eval_every >= 0, f"train.eval_every is {self.eval_every}, but must not be negative.")
        require(
            (self.epochs is None) != (self.steps is None), "Give train.epochs or train.steps, one of them and not both."
        )
        for name in ("epochs", "steps"):
            value = getattr(self, name)
            require(value is None or value > 0, f"train.{name} is {value}, but must be above 0.")
        require(self.keep >= 0, f"train.keep is {self.keep}, but must not be negative.")


@dataclass(frozen=True)
class EvalSettings:
    batch_size: int = setting(10, "Streams the text is cut into; each starts without context. 1 is exact.")
    length: int = setting(140, "Tokens a step; changes the result only of a transformer without eval_same_length.")
    valid_batch_size: int | None = setting(None, "Streams of the validations during training; batch_size by default.")
    public: bool = setting(False, "Report 10 streams too, the protocol of the public Transformer-XL code.")

    def __post_init__(self) -> None:
        for name in ("batch_size", "length", "valid_batch_size"):
            value = getattr(self, name)
            require(value is None or value >= 1, f"eval.{name} is {value}, but must be at least 1.")
