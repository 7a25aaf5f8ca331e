"""Names and types of all settings, for type checkers; ``tests/support/typed_settings.py`` writes this file.

`RunSettings` are those of the task and of every method; that a method has one of them is checked when it runs.
"""

# ruff: noqa: D101 - each dictionary is named after its class, whose fields have the docstrings

from collections.abc import Sequence
from pathlib import Path
from typing import Literal, TypedDict

from fedstill.attacks.reconstruction import ModelInversion as ReconstructionModelInversion
from fedstill.attacks.rmia import Rmia as Rmia
from fedstill.distill.boosting import HardGeneration as BoostingHardGeneration
from fedstill.distill.boosting import Reweighting as BoostingReweighting
from fedstill.distill.coreset import Coreset as Coreset
from fedstill.distill.distillates import Autoencoding as DistillatesAutoencoding
from fedstill.distill.distillates import CoreSet as DistillatesCoreSet
from fedstill.distill.distillates import LatentDescent as DistillatesLatentDescent
from fedstill.distill.distribution_matching import DistributionMatching as DistributionMatching
from fedstill.distill.embedding import ImageFitting as EmbeddingImageFitting
from fedstill.distill.ensemble import Distillation as EnsembleDistillation
from fedstill.distill.generation import DAFL as GenerationDAFL
from fedstill.distill.generation import Generation as Generation
from fedstill.distill.inversion import Inversion as Inversion
from fedstill.distill.kip import KIP as KIP
from fedstill.distill.mixtures import Mixture as MixturesMixture
from fedstill.distill.public_map import PublicMap as PublicMap
from fedstill.distill.stacking import ServerAdam as StackingServerAdam
from fedstill.distill.synthesis import GradientMatching as SynthesisGradientMatching
from fedstill.methods.parts.distillation import ScoreTraining as DistillationScoreTraining
from fedstill.methods.parts.gaussians import FisherMix as GaussiansFisherMix
from fedstill.methods.parts.private_heads import HeadTraining as PrivateHeadsHeadTraining
from fedstill.models.heads import Buckets as HeadsBuckets
from fedstill.train.augment import Views as AugmentViews
from fedstill.train.condensation import CondensedTraining as CondensationCondensedTraining
from fedstill.train.contrastive import SimCLR as ContrastiveSimCLR
from fedstill.train.extractor import Extractor as Extractor
from fedstill.train.feedback import Feedback as Feedback
from fedstill.train.feedback import PrivateSGD as FeedbackPrivateSGD
from fedstill.train.losses import LDAM as LossesLDAM
from fedstill.train.losses import Denoising as LossesDenoising
from fedstill.train.sgd import SGD as SGD
from fedstill.train.sgd import Adam as SgdAdam


class SGDSettings(TypedDict, total=False):
    batch_size: int
    decay: float
    epochs: int | None
    lr: float
    max_steps: int | None
    milestones: Sequence[int] | int
    momentum: float
    weight_decay: float


class SgdAdamSettings(TypedDict, total=False):
    batch_size: int
    epochs: int
    lr: float
    weight_decay: float


class DistillatesCoreSetSettings(TypedDict, total=False):
    crops: int
    pool: int
    smallest: float


class CondensationCondensedTrainingSettings(TypedDict, total=False):
    augment: str
    batch_size: int
    cutmix: float
    epochs: int
    lr: float
    momentum: float
    weight_decay: float


class SynthesisGradientMatchingSettings(TypedDict, total=False):
    anneal: bool
    augment: str
    batch_size: int
    choose: Literal["representatives"] | Literal["random"]
    distance: Literal["grouped"] | Literal["mse"] | Literal["cos"] | Literal["convolutions"]
    formation: int
    init: Literal["noise"] | Literal["real"] | Literal["representatives"]
    interval: int
    lr: float
    momentum: float
    net_epochs: int
    net_lr: float
    nets: int
    pool: int
    steps: int
    train_on: Literal["synthetic"] | Literal["real"]


class EmbeddingImageFittingSettings(TypedDict, total=False):
    augment: str
    lr: float
    nets_per_step: int
    steps: int


class DistributionMatchingSettings(TypedDict, total=False):
    augment: str
    batch_size: int
    batch_statistics: bool
    clamp: bool
    init: Literal["real"] | Literal["noise"]
    logits: bool
    lr: float
    min_records: int
    momentum: float
    rho: float
    squared: bool
    steps: int
    top_up: bool


class KIPSettings(TypedDict, total=False):
    batch_size: int
    bias_std: float
    clamp: bool
    depth: int
    lr: float
    ridge: float
    standardise: Literal["global"] | Literal["client"]
    steps: int
    stop: Literal["plateau"] | Literal["batch_accuracy"] | Literal["never"]
    tolerance: float
    weight_std: float


class CoresetSettings(TypedDict, total=False):
    algorithm: Literal["gmm"] | Literal["dbscan"]
    covariance: Literal["full"] | Literal["diag"] | Literal["spherical"]
    eps: float
    iterations: int
    min_samples: int


class LossesLDAMSettings(TypedDict, total=False):
    beta: float
    defer: float
    largest: float
    scale: float


class EnsembleDistillationSettings(TypedDict, total=False):
    batch_size: int
    epochs: int
    lr: float
    outputs: Literal["logits"] | Literal["probabilities"]
    weight_decay: float


class GenerationSettings(TypedDict, total=False):
    batch_size: int
    beta1: float
    bn: float
    ce: float
    div: float
    fresh: bool
    keep_lowest: bool
    lr: float
    ngf: int
    nz: int
    steps: int
    view: Literal["none"] | Literal["crop"] | Literal["flip"] | Literal["crop_flip"]


class BoostingHardGenerationSettings(TypedDict, total=False):
    batch_size: int
    beta1: float
    bn: float
    ce: float
    div: float
    div_temperature: float
    fresh: bool
    hardness: float
    keep_lowest: bool
    lr: float
    ngf: int
    nz: int
    steps: int
    view: Literal["none"] | Literal["crop"] | Literal["flip"] | Literal["crop_flip"]


class BoostingReweightingSettings(TypedDict, total=False):
    decay: float
    step: float


class GenerationDAFLSettings(TypedDict, total=False):
    activation: float
    balance: float
    batch_size: int
    lr: float
    nz: int
    one_hot: float
    steps: int


class InversionSettings(TypedDict, total=False):
    adaptive: float
    batch_size: int
    bn: float
    ce: float
    jitter: int
    lr: float
    reversed_js: bool
    steps: int
    temperature: float
    tv: float


class StackingServerAdamSettings(TypedDict, total=False):
    adaptivity: float
    beta1: float
    beta2: float
    lr: float


class AugmentViewsSettings(TypedDict, total=False):
    brightness: float
    contrast: float
    flip: float
    gray: float
    hue: float
    jitter: float
    ratio: Sequence[float]
    saturation: float
    scale: Sequence[float]


class DistillatesAutoencodingSettings(TypedDict, total=False):
    latents: int
    training: SgdAdam | SgdAdamSettings
    width: int


class DistillatesLatentDescentSettings(TypedDict, total=False):
    ce: float
    lr: float
    steps: int
    weight_decay: float


class ContrastiveSimCLRSettings(TypedDict, total=False):
    batch_size: int
    epochs: int
    lr: float
    projection: Sequence[int]
    temperature: float
    views: AugmentViews | AugmentViewsSettings
    weight_decay: float


class ExtractorSettings(TypedDict, total=False):
    file: str | None
    pretrain: Literal["simclr"] | Literal["none"]
    simclr: ContrastiveSimCLR | ContrastiveSimCLRSettings


class PublicMapSettings(TypedDict, total=False):
    dims: int
    quantile: float
    records: int
    ridge: float
    whiten: bool


class GaussiansFisherMixSettings(TypedDict, total=False):
    energy: float
    samples: int
    temperature: float
    training: SgdAdam | SgdAdamSettings


class MixturesMixtureSettings(TypedDict, total=False):
    components: int
    covariance: Literal["diag"] | Literal["spherical"] | Literal["full"]
    iterations: int
    tolerance: float


class HeadsBucketsSettings(TypedDict, total=False):
    group: int
    thresholds: int


class PrivateHeadsHeadTrainingSettings(TypedDict, total=False):
    bias: float
    lam: float
    logit_noise: float
    penalty: float | None
    scaling: Literal["paper"] | Literal["repository"]


class DistillationScoreTrainingSettings(TypedDict, total=False):
    penalty: float
    share: float


class LossesDenoisingSettings(TypedDict, total=False):
    batch_size: int
    epochs: int
    lr: float
    weight_decay: float


class FeedbackPrivateSGDSettings(TypedDict, total=False):
    batch_size: int
    clip: float
    lr: float
    steps: int
    supposed_records: int


class FeedbackSettings(TypedDict, total=False):
    coldest: float
    decay: float
    hottest: float
    least_noise: float
    loss_fall: Literal["signed"] | Literal["magnitude"]
    noise_from: float
    steepness: float
    temperature_from: float
    time_slope: float
    weights: Sequence[float]


class RmiaSettings(TypedDict, total=False):
    a: float | None
    gamma: float


class ReconstructionModelInversionSettings(TypedDict, total=False):
    lr: float
    spread: float
    steps: int
    tv: float


class SharedSettings(TypedDict, total=False):
    budget: float | None
    class_names: Sequence[str]
    clients: int
    cpus_per_client: float
    delta: float
    device: str
    drop: float
    engine: Literal["inprocess"] | Literal["flower"]
    evaluate_every: int
    evaluate_uploads: bool
    features: str | None
    gpus_per_client: float
    group: str | None
    group_bound: int | None
    keep_replies: bool
    label_column: str | None
    limit: int | None
    local_test: float
    max_message_mb: int
    mean: Sequence[float] | float
    measure: (
        Literal["accuracy"]
        | Literal["balanced-accuracy"]
        | Literal["f1"]
        | Literal["auc"]
        | Literal["average-precision"]
        | Literal["sensitivity"]
        | Literal["specificity"]
        | Literal["precision"]
        | Literal["brier"]
        | Literal["log-loss"]
        | Literal["rmse"]
        | Literal["mae"]
        | Literal["r2"]
        | None
    )
    min_clients: int | None
    model: str
    models: Sequence[str]
    noise: Literal["simulated"] | Literal["entropy"]
    num_classes: int | None
    partition: str
    public: str | None
    scale: str | None
    schema_file: Path | str | None
    size: int | None
    slow: float
    std: Sequence[float] | float
    sums: str
    threads: int
    timeout: float | None
    validation: float
    workers: int | None


class RunSettings(SharedSettings, total=False):
    activation: Literal["gelu"] | Literal["relu"] | Literal["tanh"] | Literal["sigmoid"]
    aggregate: Literal["ensemble"] | Literal["distilled"]
    average: Literal["logits"] | Literal["probabilities"]
    beta: float
    bias: float
    block_ridge: float
    body: SGD | SGDSettings
    buckets: HeadsBuckets | HeadsBucketsSettings
    candidates: int
    choice: Literal["random"] | Literal["representatives"] | Literal["crops"]
    class_weights: str | None
    classifier: Literal["nb"] | Literal["lda"] | Literal["qda"] | Literal["fisher-mix"]
    clip: float
    coding: DistillatesAutoencoding | DistillatesAutoencodingSettings
    contrast: bool
    core: DistillatesCoreSet | DistillatesCoreSetSettings
    coreset: Coreset | CoresetSettings
    count_share: float
    covariance: Literal["within"] | Literal["total"]
    crops: DistillatesCoreSet | DistillatesCoreSetSettings
    damping: float
    decay: float
    denoising: LossesDenoising | LossesDenoisingSettings
    digest: SgdAdam | SgdAdamSettings
    distillation: EnsembleDistillation | EnsembleDistillationSettings | SgdAdam | SgdAdamSettings
    dpc: int
    energy_first: float
    energy_last: float
    epochs: int
    epsilon: float | None
    expanded: int
    extractor: Extractor | ExtractorSettings
    factor: float
    feedback: Feedback | FeedbackSettings
    first_share: float
    fisher_mix: GaussiansFisherMix | GaussiansFisherMixSettings
    fitting: (
        EmbeddingImageFitting
        | EmbeddingImageFittingSettings
        | DistillatesLatentDescent
        | DistillatesLatentDescentSettings
    )
    formation: int
    fusion: Literal["records"] | Literal["uniform"] | Literal["informative"]
    gain: float
    generation: (
        Generation
        | GenerationSettings
        | BoostingHardGeneration
        | BoostingHardGenerationSettings
        | GenerationDAFL
        | GenerationDAFLSettings
    )
    head: SGD | SGDSettings | PrivateHeadsHeadTraining | PrivateHeadsHeadTrainingSettings
    hidden: int
    hostile: int
    images: int
    instance: Literal["kip"] | Literal["coreset"]
    inversion: Inversion | InversionSettings
    ipc: int
    kip: KIP | KIPSettings
    latents: int
    ldam: LossesLDAM | LossesLDAMSettings
    least_clip: float
    least_noise: float
    local: SGD | SGDSettings | SgdAdam | SgdAdamSettings | FeedbackPrivateSGD | FeedbackPrivateSGDSettings
    local_loss: Literal["ce"] | Literal["ldam"]
    local_norm: Literal["batch"] | Literal["frozen-after-first"]
    local_view: Literal["none"] | Literal["crop"] | Literal["flip"] | Literal["crop_flip"]
    matching: (
        SynthesisGradientMatching
        | SynthesisGradientMatchingSettings
        | DistributionMatching
        | DistributionMatchingSettings
    )
    means: int
    mixture: MixturesMixture | MixturesMixtureSettings
    mu: float
    negatives: float
    neighbours: int
    nets: int
    noise_multiplier: float
    noise_ridge: float
    optimiser: StackingServerAdam | StackingServerAdamSettings
    participation: float
    patience: int
    perturbation: float
    pixels: Literal["uint8"] | Literal["float32"]
    pool: int
    precision: Literal["half"] | Literal["single"] | Literal["double"]
    pretrain: Literal["labels"] | Literal["none"]
    privacy: Literal["sound"] | Literal["published"]
    projection: SgdAdam | SgdAdamSettings
    proxy: float
    pull: float
    quantile: float
    relabel: Literal["likeliest"] | Literal["drop"] | Literal["none"]
    revisit: SgdAdam | SgdAdamSettings
    reweighting: BoostingReweighting | BoostingReweightingSettings
    ridge: float
    rounds: int
    rule: (
        Literal["median"]
        | Literal["trimmed-mean"]
        | Literal["krum"]
        | Literal["multi-krum"]
        | Literal["geometric-median"]
    )
    samples: int
    scores: DistillationScoreTraining | DistillationScoreTrainingSettings
    server_lr: float
    share: float
    shrinkage: float
    soft_labels: Literal["none"] | Literal["client"] | Literal["server"] | bool
    solution: Literal["exact"] | Literal["expectation"]
    space: PublicMap | PublicMapSettings
    spectrum: Literal["clamped"] | Literal["cleaned"]
    standardise: bool
    start: Literal["fresh"] | Literal["mean"]
    steps: int | None
    student: SGD | SGDSettings | Literal["head"] | Literal["network"] | Literal["mean"] | Literal["fresh"]
    student_view: Literal["none"] | Literal["crop"] | Literal["flip"] | Literal["crop_flip"]
    teacher: SGD | SGDSettings
    temperature: float
    threshold: float | Literal["debiased"] | Literal["published"]
    training: (
        CondensationCondensedTraining
        | CondensationCondensedTrainingSettings
        | SGD
        | SGDSettings
        | SgdAdam
        | SgdAdamSettings
    )
    transfer: SgdAdam | SgdAdamSettings
    truncation: float
    tuning: SGD | SGDSettings
    update: SGD | SGDSettings
    vectors: Literal["float32"] | Literal["float16"]
    views: AugmentViews | AugmentViewsSettings
    weighting: Literal["records"] | Literal["uniform"] | Literal["counts"] | Literal["equal"]
    width: int
    within: bool
    seed: int


class AuditSettings(TypedDict, total=False):
    clients: int | None
    confidence: float
    epsilon: Sequence[float] | float
    out: str | Path
    seed: int


class PlanSettings(TypedDict, total=False):
    classes: int
    clients: int
    data: str | None
    delta: float
    dims: int
    epsilon: Sequence[float] | float
    extractor: Extractor | ExtractorSettings
    limit: int | None
    model: str
    partition: str
    penalty: float | None
    public: str
    records: int
    sampling: float
    seed: int
    steps: int


class AttackSettings(TypedDict, total=False):
    client: int | None
    flip: bool
    inversion: ReconstructionModelInversion | ReconstructionModelInversionSettings
    judge: SGD | SGDSettings
    least_share: float
    rmia: Rmia | RmiaSettings
    score: Literal["lira"] | Literal["rmia"]
    shadows: int | None
